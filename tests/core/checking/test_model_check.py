"""Settings that a model refuses: named with their keys and values that work, on tensors without data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from command_line import refusal

from terakoya.checking import model_check
from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.commands.main import DEBUG_VARIABLE
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.model.build import build_module_for_training

BERT = toy.parameters(Path("store"))["architecture"]
MODERN = {**BERT, "type": "modernbert", "num_attention_heads": 4}
ELECTRA = {**BERT, "type": "electra"}


def check(architecture: Mapping[str, Any], objective: Mapping[str, Any] | None = None, **other: Any) -> None:
    objective = {"type": "masked_lm"} if objective is None else objective
    raw = toy.parameters(Path("store"), architecture=architecture, objective=objective)
    model_check.check_model(Parameters.from_dict(raw, source="test"), synthetic_vocabulary(64, 32), **other)


@pytest.mark.parametrize(
    ("architecture", "objective", "message"),
    [
        ({**BERT, "hidden_act": "gelus"}, None, r'^architecture.hidden_act: .* "gelu", got "gelus" \(the model'),
        ({**BERT, "hidden_dropout_prob": 1.5}, None, "hidden_dropout_prob: .* such as 0.1, got 1.5"),
        ({**BERT, "type_vocab_size": 1 << 70}, None, "type_vocab_size: .* such as 2, got 1180591620717411303424"),
        ({**MODERN, "hidden_size": 12}, None, "num_attention_heads: .* such as 3, got 4"),
        (ELECTRA, {"type": "replaced_token"}, "1/4 of num_attention_heads 2 is not a whole number; use one of 1/2"),
        (
            ELECTRA, {"type": "replaced_token", "generator": {**ELECTRA, "hidden_act": "x"}},
            'objective.generator.hidden_act: .* such as "gelu", got "x"',
        ),
    ],
    ids=["name", "share", "enormous", "head size", "generator size", "generator"],
)  # fmt: skip
def test_what_a_model_refuses_is_named_with_values_that_work(
    architecture: dict[str, Any], objective: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check(architecture, objective)


def test_what_is_no_matter_of_settings_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from terakoya_plugins.architectures.bert import Bert

    monkeypatch.setattr(Bert, "config_class", "BertConfi")
    with pytest.raises(
        UserError, match=r"^architecture Bert: config_class: .* has no class BertConfi; did .* BertConf"
    ):
        check(BERT)
    monkeypatch.setattr(Bert, "config_class", "BertConfig")
    monkeypatch.setattr(Bert, "model_classes", {"masked": "BertForMaskLM"})
    with pytest.raises(
        UserError, match=r"Bert: model_classes: .* no class BertForMaskLM; did you mean BertForMaskedLM"
    ):
        check(BERT)
    monkeypatch.setattr(Bert, "model_classes", {"masked": "BertForMaskedLM"})
    monkeypatch.setattr(Bert, "vocabulary_head", ("cls.prediction",))
    with pytest.raises(UserError, match=r"^architecture: the code of Bert fails: AttributeError: .*prediction"):
        check(BERT)


def test_nothing_is_allocated_and_only_the_size_of_one_layer_counts() -> None:
    before = torch.random.get_rng_state()
    check({**BERT, "hidden_size": 1 << 20, "intermediate_size": 1 << 21, "num_hidden_layers": 1000})  # 10^16 weights
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("architecture", "objective", "key"),
    [
        ({**BERT, "num_hidden_layers": 10**6}, None, "architecture.num_hidden_layers"),
        ({"type": "t5", "num_layers": 2, "num_decoder_layers": 10**6}, {"type": "span_corruption", "layout": "stream"},
         "architecture.num_decoder_layers"),
        (ELECTRA, {"type": "replaced_token", "generator": {**ELECTRA, "num_hidden_layers": 10**6}},
         "objective.generator.num_hidden_layers"),
    ],
)  # fmt: skip
def test_a_number_of_layers_that_nobody_can_build_is_refused_at_once(
    architecture: dict[str, Any], objective: dict[str, Any] | None, key: str
) -> None:
    with pytest.raises(UserError, match=f"^{key}: expected at most 10,000 layers, got 1,000,000$"):
        check(architecture, objective, small_too=False)


def test_weights_that_no_memory_of_this_machine_holds_are_refused_before_they_are_built() -> None:
    def weights_fit(layers: int, total: int) -> bool:
        raw = toy.parameters(Path("store"), architecture={**BERT, "num_hidden_layers": layers})
        try:
            model_check.check_memory(Parameters.from_dict(raw, source="test"), vocabulary, total=total)
        except UserError as error:
            assert "architecture: the model has" in str(error) and "this machine has" in str(error)
            return False
        return True

    vocabulary = synthetic_vocabulary(64, 32)
    raw = toy.parameters(Path("store"), architecture={**BERT, "num_hidden_layers": 5})
    module = build_module_for_training(Parameters.from_dict(raw, source="test"), vocabulary)
    size = 4 * sum(each.numel() for each in module.parameters())
    assert weights_fit(5, size) and not weights_fit(5, size - 1)
    assert not weights_fit(9000, 10**7)


def test_before_a_small_model_no_row_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {**MODERN, "hidden_size": 12}  # its first row finds this, building does not
    check(odd, small_too=False)
    monkeypatch.setattr(model_check, "LARGE", 1)
    with pytest.raises(UserError, match="num_attention_heads"):
        check(odd, small_too=False)


def test_what_tensors_without_data_cannot_do_is_no_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks_at_values(*_: Any, **__: Any) -> Any:
        return torch.zeros(3).numpy()

    monkeypatch.setattr(model_check, "build_module_for_training", looks_at_values)
    check(BERT)


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["train", "dry run"])
def test_training_names_what_the_first_row_finds(
    arguments: tuple[str, ...], store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(DEBUG_VARIABLE, "")
    file = tmp_path / "p.json"
    file.write_text(json.dumps(toy.parameters(store, architecture={**MODERN, "hidden_size": 12})))
    said = refusal(capsys, "train", file, "--out", tmp_path / "run", *arguments)
    assert "architecture.num_attention_heads: expected a value that ModernBert takes, such as 3, got 4" in said


def test_estimate_names_what_the_first_row_finds(store: Path) -> None:
    from terakoya_planning.estimate import estimate

    raw = toy.parameters(store, architecture={**MODERN, "hidden_size": 12})
    with pytest.raises(UserError, match=r"num_attention_heads: .* such as 3, got 4"):
        estimate(Parameters.from_dict(raw, source="test"), device="cpu")

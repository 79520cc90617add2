"""Frozen weights keep their bits, in one process and in several, and after a resume; the rest is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from frozen_weights import is_low
from killed_runs import kill_and_resume
from safetensors.torch import load_file
from saved_weights import weights
from selection import at_night
from start_folders import electra, save_bert, settings
from torch import nn

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.rows.stores import Stores
from terakoya.training.model.build import build_module
from terakoya.training.model.frozen_layers import freeze
from terakoya.training.setup import StartOptions, train_in_this_process


def frozen_and_trained(raw: dict[str, Any]) -> tuple[set[str], set[str]]:
    parameters = Parameters.from_dict(raw, source="test")
    vocabulary = Stores.open(parameters.data).vocabulary
    module = build_module(parameters, vocabulary)
    freeze(
        module,
        parameters.objective.architectures(parameters.architecture),
        vocabulary,
        count=parameters.frozen_layers,
    )
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, parameter in module.named_parameters():
        found[parameter.requires_grad].add(name)
    return found[False], found[True]


def test_minus_one_freezes_nothing_and_zero_the_embeddings(store: Path) -> None:
    assert frozen_and_trained(settings(store, None))[0] == set()
    frozen, trained = frozen_and_trained(settings(store, None, frozen_layers=0))
    assert frozen == {
        "model.bert.embeddings.word_embeddings.weight",
        "model.bert.embeddings.position_embeddings.weight",
        "model.bert.embeddings.token_type_embeddings.weight",
        "model.bert.embeddings.LayerNorm.weight",
        "model.bert.embeddings.LayerNorm.bias",
    }, "and with the word embeddings the head's matrix, which is tied"
    assert "model.cls.predictions.bias" in trained, "the head's bias is its own"
    frozen, trained = frozen_and_trained(settings(store, None, frozen_layers=2))
    assert len(frozen) == 5 + 2 * 16 and all(name.startswith("model.cls.") for name in trained)


@pytest.mark.parametrize("sharing", ["tied", "none", "disentangled"])
def test_both_models_of_electra_are_frozen(sharing: str, store: Path) -> None:
    raw = {**electra(store, None, sharing=sharing), "frozen_layers": 1}
    frozen, trained = frozen_and_trained(raw)
    assert all(is_low(name) for name in frozen) and not any(is_low(name) for name in trained)
    for model in ("generator", "discriminator"):
        assert sum(name.startswith(f"{model}.electra.encoder.layer.0.") for name in frozen) == 16
        assert f"{model}.electra.embeddings_project.weight" in frozen, "it is before the first layer"
    assert {"generator.generator_lm_head.bias", "discriminator.discriminator_predictions.dense.weight"} <= trained


def test_a_nested_generator_of_another_shape_is_frozen_too(store: Path) -> None:
    raw = electra(store, None, sharing="none")
    generator = {**raw["architecture"], "type": "bert", "num_attention_heads": 2, "num_hidden_layers": 1}
    generator.pop("embedding_size")
    raw["objective"] = {"type": "replaced_token", "generator": generator, "sharing": "none"}
    frozen, _ = frozen_and_trained({**raw, "frozen_layers": 1})
    assert "generator.bert.encoder.layer.0.output.dense.weight" in frozen
    with pytest.raises(UserError, match="expected at most 1, as many layers as BertForMaskedLM has, got 2"):
        frozen_and_trained({**raw, "frozen_layers": 2})


def test_more_frozen_layers_than_layers_are_refused(store: Path) -> None:
    with pytest.raises(
        UserError, match="frozen_layers: expected at most 2, as many layers as BertForMaskedLM has, got 3"
    ):
        frozen_and_trained(settings(store, None, frozen_layers=3))
    with pytest.raises(UserError, match=r"frozen_layers: expected greater than or equal to -1, got -2"):
        frozen_and_trained(settings(store, None, frozen_layers=-2))


def test_nothing_left_to_train_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_head(*_: Any) -> nn.Module:
        module = nn.Module()
        module.bert = build_module(parameters, vocabulary).model.bert  # type: ignore[union-attr]
        return module

    parameters = Parameters.from_dict(settings(store, None, frozen_layers=2), source="test")
    vocabulary = Stores.open(parameters.data).vocabulary
    with pytest.raises(UserError, match="2 leaves nothing to train"):
        freeze(
            without_head(),
            parameters.objective.architectures(parameters.architecture),
            vocabulary,
            count=parameters.frozen_layers,
        )


@pytest.mark.slow
@pytest.mark.parametrize("processes", at_night((1, 2), always=(1,)))
def test_frozen_weights_keep_their_bits(processes: int, store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    table = {"0": 9, "1": 7} if processes == 2 else {"-1": 16}
    raw = settings(store, str(tmp_path / "m"), frozen_layers=1, max_steps=4, batch_size=table)
    said = toy.train(raw, tmp_path / "run", nodes=(1,) * processes)
    assert "8,728 parameters, 2,728 of them trained (embeddings and the lowest layer frozen)" in said
    before = load_file(tmp_path / "m/model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step-00000004/model/model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = value.numpy().tobytes() == after[name].numpy().tobytes()
        assert same == is_low(name), name
    moments = load_file(tmp_path / "run/checkpoints/step-00000004/state/optimizer-00000.safetensors")
    assert moments and not any(is_low(name) for name in moments), "the optimizer has trained weights only"


@pytest.mark.nightly
@pytest.mark.parametrize("processes", (1, 2))
def test_killed_and_resumed_is_bit_identical(processes: int, store: Path, tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    table = {"0": 9, "1": 7} if processes == 2 else {"-1": 16}
    raw = toy.parameters(store, start_from=str(tmp_path / "m"), frozen_layers=1, batch_size=table)
    _, said = kill_and_resume(raw, tmp_path, nodes=(1,) * processes)
    assert "of them trained" in said


@pytest.mark.slow
def test_another_number_of_frozen_layers_needs_allow_change(store: Path, tmp_path: Path) -> None:
    raw = settings(store, None, frozen_layers=1, max_steps=1)

    def resume(steps: int, frozen: int, **options: Any) -> None:
        changed = {**raw, "max_steps": steps, "frozen_layers": frozen}
        train_in_this_process(Parameters.from_dict(changed, source="test"), tmp_path / "run", StartOptions(**options))

    resume(1, 1)
    with pytest.raises(UserError, match="--allow-change frozen_layers"):
        resume(2, -1)
    for steps, frozen in ((2, -1), (3, 2)):
        resume(steps, frozen, allow_change=frozenset({"frozen_layers"}))
    one, two, three = (weights(tmp_path / "run", step) for step in (1, 2, 3))
    low, high, head = (
        "model.bert.encoder.layer.0.output.dense.weight",
        "model.bert.encoder.layer.1.output.dense.weight",
        "model.cls.predictions.transform.dense.weight",
    )
    assert not torch.equal(one[low], two[low]) and torch.equal(two[low], three[low])
    assert not torch.equal(one[high], two[high]) and torch.equal(two[high], three[high])
    assert not torch.equal(two[head], three[head])
    moments = load_file(tmp_path / "run/checkpoints/step-00000003/state/optimizer-00000.safetensors")
    assert not any(".encoder." in name for name in moments)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    warned = [json.loads(line)["text"] for line in lines if "stay randomly initialised" in line]
    assert len(warned) == 1 and "frozen_layers 1" in warned[0]  # what is frozen at a checkpoint has been trained


def test_freezing_untrained_weights_prints_a_warning(store: Path, tmp_path: Path) -> None:
    train_in_this_process(Parameters.from_dict(settings(store, None, frozen_layers=0), source="test"), tmp_path / "run")
    texts = [json.loads(line).get("text", "") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert any("frozen_layers 0 without start_from" in text for text in texts)

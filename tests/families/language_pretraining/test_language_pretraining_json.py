"""retarfi/language-pretraining's parameter.json trains as it is; invalid entries are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.components import Progress
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_language_pretraining.entries import SHIPPED, ChosenEntry, read_entry

ENTRY: dict[str, Any] = {
    "number-of-layers": 12,
    "hidden-size": 256,
    "sequence-length": 128,
    "ffn-inner-hidden-size": 1024,
    "attention-heads": 4,
    "warmup-steps": 10000,
    "learning-rate": 5e-4,
    "batch-size": {"-1": 128},
    "train-steps": 1450000,
}
ELECTRA = {"embedding-size": 128, "generator-size": "1/4", "mask-percent": 15}


def read(
    tmp_path: Path, changes: dict[str, Any] | None = None, *, model_type: str = "bert-small", **options: Any
) -> dict[str, Any]:
    """Reads an entry made of `ENTRY` and `changes`; a change to None removes the key."""
    entry = {key: value for key, value in {**ENTRY, **(changes or {})}.items() if value is not None}
    file = tmp_path / "parameter.json"
    file.write_text(json.dumps({model_type: entry, "other": {"broken": "never read"}}))
    return read_entry(file, ChosenEntry(model_type, [Path("work/store")], **options))


def load(tmp_path: Path, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    return Parameters.from_dict(read(tmp_path, changes, **options), source="parameter.json")


def refusal(tmp_path: Path, changes: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(tmp_path, changes, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "length", "rate", "batch", "steps", "save"),
    [
        ("bert-small", 12, 256, 128, 5e-4, {"-1": 128}, 1_450_000, 100_000),
        ("bert-base", 12, 768, 512, 1e-4, {"-1": 256}, 1_000_000, 50_000),
        ("bert-large", 24, 1024, 512, 1e-4, {"-1": 256}, 464_000, 50_000),
        ("bert-base-dist", 12, 768, 512, 1e-4, {"0": 80, "1": 80, "2": 48, "3": 48}, 1_000_000, 50_000),
    ],
)
def test_the_bundled_entries_become_these_parameters(
    name: str, layers: int, hidden: int, length: int, rate: float, batch: dict[str, int], steps: int, save: int
) -> None:
    raw = read_entry(SHIPPED, ChosenEntry(name, [Path("a"), Path("b")], [Path("v")]))
    parameters: Any = Parameters.from_dict(raw, source="parameter.json")
    assert (parameters.architecture.num_hidden_layers, parameters.architecture.hidden_size) == (layers, hidden)
    assert parameters.data.sequence_length == parameters.architecture.max_position_embeddings == length
    assert [str(each.store) for each in parameters.data.train] == ["a", "b"]
    assert [str(store) for store in parameters.data.validation] == ["v"]
    assert (parameters.optimizer.learning_rate, parameters.batch_size, parameters.max_steps) == (rate, batch, steps)
    assert (parameters.checkpoint.save_steps, parameters.logging_steps) == (save, 5000)
    assert parameters.evaluation.steps == save


def test_constants_of_the_originals_code_are_written_out(tmp_path: Path) -> None:
    parameters = load(tmp_path)
    optimizer = parameters.optimizer
    assert (optimizer.eps, optimizer.bias_correction, optimizer.weight_decay) == (1e-6, False, 0.01)
    assert optimizer.betas == (0.9, 0.999)
    assert parameters.max_grad_norm == 1.0 and parameters.seed == 42 and parameters.precision == "fp32"
    assert parameters.schedule.warmup_steps == 10000
    run = (Progress(step=step, max_steps=1_450_000) for step in (4999, 730_000))
    rising, falling = (parameters.schedule.factor(progress) for progress in run)
    assert (rising, falling) == (0.5, 0.5), "warm-up, then decay to 0"
    objective = parameters.objective
    assert (objective.layout, objective.next_sentence, objective.mlm_probability) == ("pairs", True, 0.15)
    assert objective.whole_word_mask is False
    assert load(tmp_path, whole_word_mask=True).objective.whole_word_mask is True
    assert parameters.evaluation is None, "no store to validate on"


def test_batch_size_times_accumulation_is_the_batch(tmp_path: Path) -> None:
    parameters = load(tmp_path, {"batch-size": {"0": 100, "1": 100, "2": 56}, "accumulation-steps": 4})
    assert parameters.batch_size == {"0": 400, "1": 400, "2": 224}
    assert parameters.micro_batch_size == 100, "one process on a node takes the entry's batch-size at once"
    four = load(tmp_path, {"batch-size": {"-1": 100}, "accumulation-steps": 2}, processes_per_node=3)
    assert (four.batch_size, four.micro_batch_size) == ({"-1": 200}, 34)
    assert load(tmp_path).micro_batch_size is None


def test_mask_percent_is_the_masking_probability(tmp_path: Path) -> None:
    assert load(tmp_path, {"mask-percent": 25}).objective.mlm_probability == 0.25


def test_precision(tmp_path: Path) -> None:
    assert load(tmp_path, {"fp16-type": 0}).precision == "fp32"
    assert load(tmp_path, {"bf16": True}).precision == "bf16"
    assert load(tmp_path, {"bf16": True, "fp16-type": 0}).precision == "bf16"
    assert load(tmp_path, {"fp16-type": 2}, fp16_type=0).precision == "fp32", "the option overrides the entry"
    assert all(load(tmp_path, {"fp16-type": kind}).precision == "fp16" for kind in (1, 2, 3))
    assert load(tmp_path, fp16_type=3).precision == "fp16"
    assert "exclude each other" in refusal(tmp_path, {"bf16": True}, fp16_type=2)
    assert "exclude each other" in refusal(tmp_path, {"bf16": True, "fp16-type": 1})


def test_missing_keys_are_named_together_with_unknown_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"hidden-size": None, "train-steps": None, "hiden-size": 3})
    assert message.splitlines() == [
        "parameter.json: bert-small.hidden-size: missing",
        "parameter.json: bert-small.train-steps: missing",
        'parameter.json: bert-small.hiden-size: unknown key; did you mean "hidden-size" or "ffn-inner-hidden-size"?',
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden-size": "256"}, 'bert-small.hidden-size: expected an integer, got "256"'),
        ({"hidden_size": 256}, 'bert-small.hidden_size: unknown key; did you mean "hidden-size"'),
        ({"batch-size": 128}, "bert-small.batch-size: expected an object, got 128"),
        ({"batch-size": {"-1": 0}}, "bert-small.batch-size.-1: expected greater than 0, got 0"),
        ({"batch-size": {"0": 80, "2": 80}}, 'batch_size: expected {"-1": ROWS} for one node'),
        ({"fp16-type": 4}, "bert-small.fp16-type: expected 0, 1, 2 or 3, got 4"),
        (
            {"generator-size": "1/4"},
            "bert-small.generator-size: has an effect only in electra entries; remove it",
        ),
        ({"flozen-layers": 6}, "flozen-layers: there is nothing to freeze without pretrained_model_name_or_path"),
        ({"pretrained_model_name_or_path": "x"}, "pretrained_model_name_or_path: x is not a folder"),
    ],
)
def test_an_invalid_entry_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tmp_path, changes)


def test_an_unknown_model_type_lists_the_nearest_entry() -> None:
    with pytest.raises(UserError, match='--model-type bert-bas: no such entry; did you mean "bert-base"'):
        read_entry(SHIPPED, ChosenEntry("bert-bas", [Path("a")]))


@pytest.mark.parametrize("family", ["albert", "debertav3"])
def test_a_family_without_a_plugin_is_refused_by_name_and_not_treated_as_bert(tmp_path: Path, family: str) -> None:
    message = refusal(tmp_path, model_type=f"{family}-base")
    assert f"architecture.type: architecture {family}: not installed" in message


def test_an_electra_entry_becomes_electra(tmp_path: Path) -> None:
    raw = read(tmp_path, ELECTRA, model_type="electra-small-paper")
    assert raw["architecture"]["type"] == "electra" and raw["architecture"]["embedding_size"] == 128
    assert raw["objective"]["type"] == "replaced_token"
    assert raw["objective"]["generator_size"] == "1/4" and raw["objective"]["mlm_probability"] == 0.15
    assert "next_sentence" not in raw["objective"]
    message = refusal(tmp_path, {"embedding-size": 128}, model_type="electra-small")
    assert "electra-small.generator-size: missing" in message and "electra-small.mask-percent: missing" in message
    wrong = refusal(tmp_path, {**ELECTRA, "generator-size": "a/b"}, model_type="electra-small")
    assert 'generator_size: expected a fraction like "1/4", at most 1, got "a/b"' in wrong


ELECTRAS = {
    # generator hidden size and heads, masked share, parameters of both over 32,768 words
    "electra-small-paper": (64, 1, 0.15, 14_436_801),
    "electra-small": (256, 4, 0.15, 23_363_457),
    "electra-base": (256, 4, 0.15, 121_113_601),
    "electra-large": (256, 4, 0.25, 356_957_441),
}


def test_every_electra_entry_is_in_the_table() -> None:
    entries = json.loads(SHIPPED.read_text())
    from_scratch = {
        name for name in entries if not name.endswith("-additional")
    }  # the others' sizes are their folders'
    assert set(ELECTRAS) == {name for name in from_scratch if name.startswith("electra")}


@pytest.mark.parametrize("name", sorted(ELECTRAS))
def test_an_electra_entry_builds_at_full_size(name: str) -> None:
    import torch

    hidden, heads, share, expected = ELECTRAS[name]
    parameters: Any = Parameters.from_dict(read_entry(SHIPPED, ChosenEntry(name, [Path("a")])), source="parameter.json")
    vocabulary = Vocabulary(size=32_768, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
    with torch.device("meta"):
        module: Any = parameters.objective.build(parameters.architecture, vocabulary)
    generator, discriminator = module.generator.config, module.discriminator.config
    assert (generator.hidden_size, generator.num_attention_heads) == (hidden, heads)
    assert generator.intermediate_size == 4 * hidden
    assert generator.num_hidden_layers == discriminator.num_hidden_layers
    assert parameters.objective.mlm_probability == share
    assert sum(parameter.numel() for parameter in module.parameters()) == expected


def test_debertav2_is_deberta_v2(tmp_path: Path) -> None:
    raw = read(tmp_path, model_type="debertav2-base")
    architecture = raw["architecture"]
    assert architecture["type"] == "deberta_v2" and raw["objective"]["type"] == "masked_lm"
    assert architecture["position_buckets"] == 64 and architecture["share_att_key"] is False


def test_a_roberta_entry_has_its_own_beta_and_no_next_sentence(tmp_path: Path) -> None:
    raw = read(tmp_path, model_type="roberta-base")
    assert raw["optimizer"]["betas"] == [0.9, 0.98] and "next_sentence" not in raw["objective"]
    assert raw["architecture"]["type_vocab_size"] == 2

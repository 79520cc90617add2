"""The encoder families and T5: published sizes, Transformers' losses, documents kept apart."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import transformers
from loaded_exports import loads
from selection import at_night

from terakoya.components import Architecture, Objective
from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.architectures import attention
from terakoya.training.setup import train_in_this_process
from terakoya_contract.toy import VOCABULARY
from terakoya_contract.toy import make_store as contract_store

PRESETS = Path(__file__).resolve().parents[2] / "parameters"

# ----------------------------------------------------------------------------------------------- published sizes

PUBLISHED: dict[str, tuple[int, float, float]] = {
    # vocabulary of the published model, its parameters in millions, of them in word embeddings
    "bert_base": (30_522, 110, 23.4),
    "bert_large": (30_522, 335, 31.3),  # 340 in the paper
    "electra_small": (30_522, 13.5, 3.9),  # 14 in the paper, over 512 positions
    "electra_base": (30_522, 110, 23.4),
    "roberta_base": (50_265, 125, 38.6),
    "deberta_base": (50_265, 139, 38.6),
    "deberta_v3_base": (128_100, 184, 98.4),  # 86 of layers, 98 of embeddings
    "modernbert_base": (50_368, 149, 38.7),
    "t5_base": (32_128, 222.9, 24.7),  # 220 in the paper
    "mmbert_base": (256_000, 307, 196.6),
    "eurobert_210m": (128_256, 211.8, 98.5),
}


def full_size(architecture: Architecture, words: int, *, pad: int = 0) -> tuple[float, float]:
    """Parameters of the body, or of a whole encoder-decoder, and of its word embeddings, in millions."""
    vocabulary = Vocabulary(size=words, pad=pad, unk=3, cls=4, sep=2, mask=5, special=(0, 1, 2, 3, 4, 5))
    with torch.device("meta"):
        model = architecture.build(vocabulary, "body" if "body" in architecture.heads else "seq2seq")
    embeddings: Any = model.get_input_embeddings()
    return sum(each.numel() for each in model.parameters()) / 1e6, embeddings.weight.numel() / 1e6


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_size(preset: str) -> None:
    words, millions, of_words = PUBLISHED[preset]
    architecture = Parameters.load(PRESETS / f"{preset}.json").architecture
    total, embedded = full_size(architecture, words, pad=1 if preset.startswith("roberta") else 0)
    assert abs(total / millions - 1) < 0.011 and round(embedded, 1) == of_words


def test_every_preset_of_a_published_size_is_in_the_table() -> None:
    others = {"bert_large", "electra_small", "eurobert_210m"}
    assert set(PUBLISHED) == {file.stem for file in PRESETS.glob("*_base.json")} - {"bert_ja_base"} | others


def test_deberta_v3s_generator_is_half_as_deep_and_as_wide() -> None:
    parameters = Parameters.load(PRESETS / "deberta_v3_base.json")
    objective: Any = parameters.objective
    half = parameters.architecture.model_copy(update={"num_hidden_layers": 6})
    assert objective.generator == half and objective.sharing == "disentangled"


# --------------------------------------------------------------------------- losses, and documents that share a row

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILY: dict[str, dict[str, Any]] = {
    "bert": {**TINY, **STILL, "max_position_embeddings": 64},
    "electra": {**TINY, **STILL, "embedding_size": 16, "max_position_embeddings": 64},
    "roberta": {**TINY, **STILL, "max_position_embeddings": 64},
    "deberta": {**TINY, **STILL, "max_position_embeddings": 64},
    "deberta-near": {**TINY, **STILL, "max_relative_positions": 6},
    "deberta-absolute": {**TINY, **STILL, "position_biased_input": True, "type_vocab_size": 2},
    "deberta_v2": {**TINY, **STILL, "position_buckets": 8, "max_position_embeddings": 64},
    "deberta_v2-apart": {**TINY, **STILL, "position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none"},
    "modernbert": {**TINY, "num_hidden_layers": 4, "local_attention": 8, "max_position_embeddings": 64},
    "eurobert": {**TINY, "num_key_value_heads": 2, "rope_theta": 500.0, "max_position_embeddings": 64},
}


def build(name: str, **objective: Any) -> tuple[Any, Any, Any]:
    """The objective, its module and the model in it, with perturbed weights."""
    architecture: Architecture = registry().component("architectures", name.partition("-")[0])(**FAMILY[name])
    learnt: Objective = registry().component("objectives", "masked_lm")(mlm_probability=0.3, **objective)
    torch.manual_seed(0)
    module: Any = learnt.build(architecture, VOCABULARY)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    module.model.tie_weights()
    attention.use(module, "sdpa")
    return learnt, module.eval(), module.model


def labels_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The label of each position (B, T), -100 where there is none."""
    labels = np.full(arrays["input_ids"].size, -100)
    used = arrays["masked_labels"] >= 0
    labels[arrays["masked_positions"][used]] = arrays["masked_labels"][used]
    return labels.reshape(arrays["input_ids"].shape)


@pytest.mark.parametrize("name", FAMILY)
def test_the_loss_of_padded_rows_is_transformers_own(name: str, tmp_path: Path) -> None:
    objective, module, model = build(name, layout="lines")
    source = RowSource(contract_store(tmp_path / "toy", unit="line"), Layout("lines"), sequence_length=32, seed=1)
    batch = objective.collate(source.load(0, np.arange(16)), VOCABULARY)
    with torch.no_grad():
        ours = module({key: torch.from_numpy(value) for key, value in batch.arrays.items()})["mlm_loss"]
    attention.release(model)
    padding = batch.arrays["document_ids"] < 0
    assert padding.any()
    with torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(batch.arrays["input_ids"]),
            attention_mask=torch.from_numpy(~padding).long(),
            labels=torch.from_numpy(labels_of(dict(batch.arrays))),
        ).loss
    assert abs(float(ours) / batch.counts["masked"] - float(theirs)) < 1e-5 * float(theirs)


@pytest.mark.parametrize(
    ("name", "backend"),
    at_night(
        itertools.product(FAMILY, ("sdpa", "eager")), always=[*((name, "sdpa") for name in FAMILY), ("bert", "eager")]
    ),
)
def test_each_token_of_a_packed_row_has_the_loss_of_its_single_document(
    name: str, backend: str, tmp_path: Path
) -> None:
    """The single document runs through plain Transformers."""
    objective, module, model = build(name)
    source = RowSource(contract_store(tmp_path / "toy"), Layout("packed"), sequence_length=60, seed=1)
    batch = objective.collate(source.load(0, np.arange(6)), VOCABULARY)
    arrays = {key: torch.from_numpy(value) for key, value in batch.arrays.items()}
    attention.use(module, backend)
    with torch.no_grad():
        logits = module.architecture.logits(model, module.architecture.hidden(model, arrays))
    attention.release(model)
    documents, most = batch.arrays["document_ids"], 0
    for row, number in {(row, number) for row, column in np.ndindex(documents.shape)
                        if (number := int(documents[row, column])) >= 0}:  # fmt: skip
        here = documents[row] == number
        with torch.no_grad():
            alone = model(input_ids=arrays["input_ids"][row][here][None]).logits[0]
        original = torch.from_numpy(source.load(0, np.array([row])).tokens[0][here]).long()
        one, other = (
            torch.nn.functional.cross_entropy(each, original, reduction="none") for each in (alone, logits[row][here])
        )
        assert (one - other).abs().max() < 1e-5 * max(1.0, float(one.max()))
        most = max(most, number)
    assert most >= 1


# ------------------------------------------------------------------------------------------ whole runs of their own

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "deberta-v3": (
        {"type": "deberta_v2", **FAMILY["deberta_v2"]},
        {
            "type": "replaced_token", "sharing": "disentangled",
            "generator": {"type": "deberta_v2", **FAMILY["deberta_v2"], "num_hidden_layers": 1},
        },
        {"generator": "DebertaV2ForMaskedLM", "discriminator": "DebertaV2ForTokenClassification"},
    ),
    "modernbert-replaced": (
        {"type": "modernbert", **FAMILY["modernbert"]},
        {"type": "replaced_token", "generator": {"type": "modernbert", **FAMILY["modernbert"], "num_hidden_layers": 2}},
        {"generator": "ModernBertForMaskedLM", "discriminator": "ModernBertForTokenClassification"},
    ),
    "roberta-replaced": (
        {"type": "roberta", **FAMILY["roberta"]},
        {"type": "replaced_token", "sharing": "none", "generator_size": "1/2"},
        {"generator": "RobertaForMaskedLM", "discriminator": "RobertaForTokenClassification"},
    ),
    "deberta": ({"type": "deberta", **FAMILY["deberta"]}, {"type": "masked_lm"}, {"": "DebertaForMaskedLM"}),
    "t5": (
        {"type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        {"type": "span_corruption"},
        {"": "T5ForConditionalGeneration"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "precision"),
    at_night(
        itertools.product(RUNS, ("fp32", "bf16")),
        always=[("modernbert-replaced", "bf16")],
    ),
)
def test_it_learns_in_both_precisions_and_loads(name: str, precision: str, tmp_path: Path) -> None:
    architecture, objective, models = RUNS[name]
    settings = toy.parameters(
        contract_store(tmp_path / "data").folder, architecture=architecture, objective=objective, precision=precision,
        optimizer={"type": "adamw", "learning_rate": 0.01}, max_steps=20, micro_batch_size=8, logging_steps=1,
    )  # fmt: skip
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    course = toy.losses(tmp_path / "run")
    assert course[20][0] < course[1][0] - 0.1
    loaded: Any = loads(tmp_path / "run", tmp_path / "model")
    assert {folder: type(model).__name__ for folder, model in loaded.items()} == models
    if name == "deberta-v3":
        assert loaded["discriminator"].config.id2label == {0: "original", 1: "replaced"}
        words = [model.get_input_embeddings().weight for model in loaded.values()]
        assert not torch.equal(*words)  # the sum of what both learn, and what the generator learns by itself


def test_a_classification_head_on_a_modernbert_reads_the_whole_text() -> None:
    """As on the published models: the mean of the last hidden states."""
    architecture: Architecture = registry().component("architectures", "modernbert")(**FAMILY["modernbert"])
    config = architecture.build(VOCABULARY, "masked").config
    torch.manual_seed(0)
    model = transformers.ModernBertForSequenceClassification(config).eval()
    ids = torch.randint(6, VOCABULARY.size, (1, 40))
    with torch.no_grad():
        mean = model.model(input_ids=ids).last_hidden_state.mean(1)
        assert torch.allclose(model(input_ids=ids).logits, model.classifier(model.head(mean)), atol=1e-6)


RETROMAE = {
    "objective": {"type": "retromae"}, "optimizer": {"type": "stable_adamw", "learning_rate": 0.01},
    "batch_size": {"-1": 7}, "micro_batch_size": 2,
}  # fmt: skip
"""Embeddings, with updates that are clipped; seven rows a step, of which one process has four."""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "changes"), [
    *((name, {}) for name in ("roberta", "deberta", "deberta_v2", "modernbert", "t5")),
    *((name, RETROMAE) for name in ("eurobert", "modernbert")),
])  # fmt: skip
def test_two_processes_train_the_same_as_one(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    architecture = {"type": name, **(RUNS["t5"][0] | {"dropout_rate": 0.0} if name == "t5" else FAMILY[name])}
    objective = {"type": "span_corruption" if name == "t5" else "masked_lm"}
    given = {"architecture": architecture, "max_steps": 4, "objective": objective} | changes
    settings = toy.parameters(contract_store(tmp_path / "data").folder, **given)
    for processes in (1, 2):
        toy.train(settings, tmp_path / f"run{processes}", nodes=(processes,))
    one, two = (toy.losses(tmp_path / f"run{processes}") for processes in (1, 2))
    for step, values in one.items():
        assert np.allclose(values, two[step], rtol=1e-5), step


@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "deberta", "deberta_v2", "modernbert", "gpt2", "gptj"])
def test_heads_that_do_not_divide_the_width_are_named_before_anything_is_made(name: str) -> None:
    raw = toy.parameters(Path("store"), architecture={"type": name, "hidden_size": 64, "num_attention_heads": 3})
    with pytest.raises(
        UserError, match=r"num_attention_heads: expected a divisor of hidden_size 64, got 3; the nearest: 2 and 4"
    ):
        Parameters.from_dict(raw, source="test")

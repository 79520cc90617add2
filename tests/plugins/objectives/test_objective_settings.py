"""Every setting of an objective reaches its batches or its module; masks are what the settings say."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selection import at_night

from terakoya.components import Architecture, Objective
from terakoya.components.rows import Rows
from terakoya.plugins import registry
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.store.writer import write_store
from terakoya.toolkit.architectures import attention
from terakoya_contract import toy

LENGTH = 32
ARCHITECTURES = {"causal_lm": "gpt2", "instruction": "gpt2", "replaced_token": "electra", "span_corruption": "t5"}
"""The others take `bert`; all without dropout."""
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "dropout_rate": 0.0,
}  # fmt: skip
GENERATOR = {
    "type": "electra", "hidden_size": 8, "embedding_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 48,
}  # fmt: skip
STREAM = {"layout": "stream"}
MEGATRON = {"layout": "megatron"}
PAIRS = {"layout": "pairs", "next_sentence": True}
MASKING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layout": ({}, STREAM),
    "mlm_probability": ({}, {"mlm_probability": 0.4}),
    "whole_word_mask": ({}, {"whole_word_mask": False}),
    "budgeted": ({}, {"budgeted": False}),
    "replace_probability": ({}, {"replace_probability": 0.3}),
    "random_probability": ({"replace_probability": 0.3}, {"random_probability": 0.6}),
}
CASES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "causal_lm": {
        "layout": ({}, STREAM),
        "bos": ({}, {"bos": True}),
        "append_eos": (STREAM, {"append_eos": False}),
        "eod_mask_loss": (STREAM, {"eod_mask_loss": True}),
        "z_loss": ({}, {"z_loss": 0.5}),
        "samples": (MEGATRON, {"samples": 1000}),
        "head_positions": ({}, {"head_positions": 7}),
    },
    "instruction": {
        "layout": ({}, {"layout": "padded"}),
        "loss_on": ({}, {"loss_on": "last_answer"}),
        "too_long": ({}, {"too_long": "drop"}),
        "z_loss": ({}, {"z_loss": 0.5}),
        "head_positions": ({}, {"head_positions": 7}),
    },
    "masked_lm": {
        **MASKING,
        "next_sentence": ({}, PAIRS),  # and its layout: they need each other
        "short_sequence_probability": (PAIRS, {"short_sequence_probability": 0.9}),
        "random_next_probability": (PAIRS, {"random_next_probability": 0.0}),
    },
    "replaced_token": {
        **MASKING,
        "generator": ({}, {"generator": GENERATOR}),
        "generator_size": ({}, {"generator_size": "1/2"}),
        "sharing": ({"generator_size": "1"}, {"sharing": "none"}),
        "temperature": ({}, {"temperature": 0.1}),
        "generator_weight": ({}, {"generator_weight": 2.0}),
        "discriminator_weight": ({}, {"discriminator_weight": 7.0}),
    },
    "contrastive": {
        "layout": ({}, {"layout": "lines"}),
        "views": ({}, {"views": "dropout"}),
        "pooling": ({}, {"pooling": "cls"}),
        "temperature": ({}, {"temperature": 0.5}),
    },
    "retromae": {
        **{name: MASKING[name] for name in ("mlm_probability", "whole_word_mask", "budgeted")},
        "layout": ({}, {"layout": "lines"}),
        "hidden_share": ({}, {"hidden_share": 0.9}),
        "decoder_weight": ({}, {"decoder_weight": 2.0}),
    },
    "span_corruption": {
        "layout": ({}, STREAM),
        "noise_density": ({}, {"noise_density": 0.4}),
        "mean_noise_span_length": ({}, {"mean_noise_span_length": 1.5}),
        "sentinels": ({}, {"sentinels": [13, 12, 11, 10, 9, 8, 7]}),
    },
}
"""Objective -> setting -> the other settings of the comparison, and what changes."""


def store_for(objective: Objective, folder: Path, documents: int) -> TokenStore:
    """A toy store with words of two and three pieces and unknown tokens, of the kind that the objective needs."""
    layout = objective.row_layout()
    has_answers = layout.whole is not None
    source = toy.make_store(folder / "toy", unit=toy.store_unit(layout), documents=documents, conversations=has_answers)
    texts: list[Any] = []
    starts: list[Any] = []
    answers: list[Any] = []
    for first, stop in zip(source.documents[:-1], source.documents[1:], strict=True):
        lines = [np.array(source.tokens[source.offsets[n] : source.offsets[n + 1]]) for n in range(first, stop)]
        for line in lines:
            line[5::9] = toy.VOCABULARY.unk
        texts.append([line.tolist() for line in lines])
        starts.append([[n % 5 in (0, 2) for n in range(len(line))] for line in lines])
        answers.append([[n % 12 in (3, 4, 5, 6) for n in range(len(line))] for line in lines])
    for each in (texts, starts, answers):
        each.append([line for text in each[:4] for line in text])  # a document longer than a row
    return write_store(
        folder / "words",
        texts,
        vocabulary=toy.VOCABULARY,
        unit=toy.store_unit(layout),
        word_starts=starts,
        answers=answers if has_answers else None,
        tokenizer_folder=source.tokenizer_folder,
    )


def rows_of(objective: Objective, folder: Path, documents: int = 48) -> Rows:
    source = RowSource(store_for(objective, folder, documents), objective.row_layout(), sequence_length=LENGTH, seed=11)
    return source.load(0, np.arange(len(source)))


def effect(name: str, settings: dict[str, Any], folder: Path) -> dict[str, str]:
    """What the objective does: its arrays, its weights, its sums, and how many positions its heads take at once."""
    folder.mkdir()
    objective = registry().component("objectives", name).model_validate(settings)
    kind = registry().component("architectures", ARCHITECTURES.get(name, "bert"))
    dropouts = {key: value for key, value in NO_DROPOUT.items() if key in kind.model_fields and name != "contrastive"}
    architecture = toy.settings(kind, **dropouts)
    assert isinstance(objective, Objective) and isinstance(architecture, Architecture)
    batch = objective.collate(rows_of(objective, folder), toy.VOCABULARY)
    torch.manual_seed(0)
    module = objective.build(architecture, toy.VOCABULARY).train()
    attention.use(module, "sdpa")
    seen: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        real = kind.logits

        def logits(self: Architecture, model: Any, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(hidden.shape))
            return real(self, model, hidden)  # type: ignore[arg-type]

        patch.setattr(kind, "logits", logits)
        torch.manual_seed(1)
        sums = module({key: torch.from_numpy(array) for key, array in batch.arrays.items()})
    shapes = sorted((key, tuple(weight.shape)) for key, weight in module.named_parameters())
    found: dict[str, Any] = {key: array.tobytes() for key, array in batch.arrays.items()}
    found |= {key: value.detach().numpy().tobytes() for key, value in sums.items()}
    found |= {"weights": objective.terms(), "parameters": shapes, "head": seen}
    return {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in found.items()}


def test_the_table_has_every_setting() -> None:
    found = {
        name: set(registry().component("objectives", name).model_fields) for name in registry().names("objectives")
    }
    assert {name: set(cases) for name, cases in CASES.items()} == found


@pytest.mark.parametrize("name", at_night(CASES, always=["masked_lm"]))
def test_every_setting_has_an_effect(name: str, tmp_path: Path) -> None:
    effects: dict[str, dict[str, str]] = {}
    for setting, (others, change) in CASES[name].items():
        if repr(others) not in effects:
            effects[repr(others)] = effect(name, others, tmp_path / f"{setting} before")
        assert effect(name, {**others, **change}, tmp_path / setting) != effects[repr(others)], setting


@pytest.mark.parametrize("name", ["masked_lm", "replaced_token"])
@pytest.mark.parametrize("budgeted", [True, False])
@pytest.mark.parametrize("whole_words", [True, False])
def test_batches_are_masked_as_the_settings_say(name: str, budgeted: bool, whole_words: bool, tmp_path: Path) -> None:
    """Special tokens never, whole words if so, and in the shares of the settings; all of them other than by default."""
    probability, masked_share, random_share = 0.4, 0.5, 0.3
    objective = registry().component("objectives", name).model_validate(
        {
            "mlm_probability": probability, "budgeted": budgeted, "whole_word_mask": whole_words,
            "replace_probability": masked_share, "random_probability": random_share,
        }
    )  # fmt: skip
    assert isinstance(objective, Objective)
    rows = rows_of(objective, tmp_path, documents=1500)
    batch = objective.collate(rows, toy.VOCABULARY)
    labels, positions = batch.arrays["masked_labels"], batch.arrays["masked_positions"]
    used = positions[labels >= 0]
    assert len(used) == batch.counts["masked"]
    chosen = np.zeros(rows.tokens.size, bool)
    chosen[used] = True
    chosen = chosen.reshape(rows.tokens.shape)
    ordinary = ~np.isin(rows.tokens, toy.VOCABULARY.special)
    assert (rows.tokens == toy.VOCABULARY.unk).any() and not chosen[~ordinary].any()
    assert np.array_equal(labels[labels >= 0], rows.tokens.reshape(-1)[used])
    assert np.array_equal(batch.arrays["input_ids"][~chosen], rows.tokens[~chosen])

    assert rows.word_starts is not None
    inside = ordinary[:, 1:] & ordinary[:, :-1] & ~rows.word_starts[:, 1:]
    divided = inside & (chosen[:, 1:] != chosen[:, :-1])
    assert inside.any() and divided.any() != whole_words, "a word is masked whole or not at all"

    wanted = probability * ordinary.sum(axis=1)
    off = np.abs(chosen.sum(axis=1) - wanted)
    assert (off.max() < 3) == budgeted, "words have at most three pieces"
    assert abs(chosen[ordinary].mean() - probability) < 0.02
    became = batch.arrays["input_ids"].reshape(-1)[used]
    ids = rows.tokens.reshape(-1)[used]
    replaced = (became != toy.VOCABULARY.mask) & (became != ids)
    kinds = len(toy.VOCABULARY.ordinary)
    assert abs((became == toy.VOCABULARY.mask).mean() - masked_share) < 0.03
    assert abs(replaced.mean() - random_share * (kinds - 1) / kinds) < 0.03

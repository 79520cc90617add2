"""Sample rows of a store as text, token by token: where tokens and words begin, and which tokens an objective masks or
predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from terakoya.components import Objective
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Marking = Literal["none", "masked", "replaced", "kept", "ignored", "answer"]
"""How an objective treats a token. `kept`: it is predicted, but the model sees the token itself. `ignored`: nothing is
predicted after it. `answer`: it belongs to an answer of a conversation."""
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class SampledToken:
    """One token, or several tokens that together are one character.

    Attributes:
        text: its text.
        tokens: number of tokens.
        starts_word: whether it starts a word; None where the store has no word starts.
        marking: how the objective treats it.
        shown: the text that the model sees in its place.
        begins_document: in causal rows, whether it is the first of a document.
        label: the text to predict after it where that is not the next token of the row; else empty.
    """

    text: str
    tokens: int
    starts_word: bool | None
    marking: Marking = "none"
    shown: str = ""
    begins_document: bool = False
    label: str = ""


def sample(
    store: TokenStore, tokenizer: PreTrainedTokenizerBase, *, rows: int, start: int = 0, most_tokens: int = 200
) -> list[list[SampledToken]]:
    """Up to `rows` sequences of `store` from sequence `start` on, each of up to `most_tokens` tokens; answers of
    conversations are marked. Raises UserError if there is no sequence `start`."""
    if not 0 <= start < store.facts.sequences:
        raise UserError(f"--start: expected a sequence from 0 to {store.facts.sequences - 1:,}, got {start:,}")
    sampled = []
    for number in range(start, min(start + rows, store.facts.sequences)):
        begin, end = store.sequence_starts(np.array([number, number + 1])).tolist()
        end = min(end, begin + most_tokens)
        starts = store.word_starts(begin, end) if store.facts.word_starts else None
        ids = store.ids(begin, end).tolist()
        markings: list[Marking] = ["none"] * len(ids)
        if store.facts.learned:
            markings = ["answer" if learnt else "none" for learnt in store.read_learned(begin, end)]
        sampled.append(_group_tokens(tokenizer, ids, starts, markings, ids))
    return sampled


def sample_masked(
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    *,
    rows: int,
    sequence_length: int,
    seed: int,
) -> list[list[SampledToken]]:
    """The first `rows` rows of `store` in `objective`'s layout, in store order, masked as in the first epoch.

    For objectives whose batches have `masked_positions` and `masked_labels`.
    """
    source = RowSource(store, objective.row_layout(), sequence_length=sequence_length, seed=seed, shuffle=False)
    batch = source.load(0, np.arange(min(rows, len(source))))
    arrays = objective.collate(batch, store.facts.vocabulary).arrays
    used = arrays["masked_labels"] >= 0
    predicted = np.isin(np.arange(batch.tokens.size), arrays["masked_positions"][used]).reshape(batch.tokens.shape)
    sampled = []
    for number, tokens in enumerate(batch.tokens):
        real = batch.document_ids[number] >= 0
        ids, inputs = tokens[real], arrays["input_ids"][number][real]
        starts = None
        if batch.word_starts is not None:
            starts = batch.word_starts[number][real] | store.facts.vocabulary.is_special[ids]
        markings = np.where(
            inputs == store.facts.vocabulary.mask, "masked", np.where(inputs == ids, "kept", "replaced")
        )
        markings = np.where(predicted[number][real], markings, "none")
        sampled.append(_group_tokens(tokenizer, ids.tolist(), starts, markings.tolist(), inputs.tolist()))
    return sampled


def sample_causal(
    store: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    *,
    rows: int,
    sequence_length: int,
    seed: int,
) -> list[list[SampledToken]]:
    """The first `rows` rows of `store` in `objective`'s layout, in store order (`megatron`: in Megatron-LM's, from
    `seed`): the inputs, where documents begin, what is predicted and where nothing is.

    For objectives of causal rows, whose batches have `labels`.
    """
    layout = objective.row_layout()
    shuffle = layout.kind == "megatron"
    source = RowSource(store, layout, sequence_length=sequence_length, seed=seed, shuffle=shuffle)
    positions = np.arange(min(rows, len(source)))
    batch = objective.collate(source.load(0, positions), store.facts.vocabulary).arrays
    begins = source.document_starts(0, positions)
    sampled = []
    for number, document_ids in enumerate(batch["document_ids"]):
        real = document_ids >= 0
        ids, labels, begin = batch["input_ids"][number][real], batch["labels"][number][real], begins[number][real]
        isolated = np.diff(document_ids[real]) != 0
        ends = np.append(isolated | begin[1:] | ((labels[:-1] >= 0) & (labels[:-1] != ids[1:])), True)
        row: list[SampledToken] = []
        for last in np.flatnonzero(ends).tolist():
            first = sum(token.tokens for token in row)
            part = slice(first, last + 1)
            markings: list[Marking] = ["ignored" if label < 0 else "none" for label in labels[part]]
            tokens = _group_tokens(tokenizer, ids[part].tolist(), None, markings, ids[part].tolist())
            tokens[0] = replace(tokens[0], begins_document=bool(begin[first]))
            label_follows = last + 1 < len(ids) and not isolated[last] and ids[last + 1] == labels[last]
            if labels[last] >= 0 and not label_follows:
                tokens[-1] = replace(tokens[-1], label=_decode(tokenizer, [int(labels[last])]))
            row += tokens
        sampled.append(row)
    return sampled


def _group_tokens(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    starts: np.ndarray | None,
    markings: Sequence[Marking],
    inputs: Sequence[int],
) -> list[SampledToken]:
    """The tokens `ids` with their texts; up to four adjacent ones with the same marking are joined where only together
    they decode to whole characters. `inputs` are the ids that the model sees."""
    tokens, at = [], 0
    while at < len(ids):
        size = 1
        text = _decode(tokenizer, ids[at : at + 1])
        while _BROKEN in text and size < 4 and at + size < len(ids) and markings[at + size] == markings[at]:
            longer = _decode(tokenizer, ids[at : at + size + 1])
            size += 1
            if _BROKEN not in longer:
                text = longer
        if _BROKEN in text:
            size = 1
        word = None if starts is None else bool(starts[at])
        shown = "" if markings[at] == "none" else _decode(tokenizer, inputs[at : at + size])
        tokens.append(SampledToken(text, size, word, markings[at], shown))
        at += size
    return tokens


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a few tokens; for a single one its piece, where that is readable, so that spaces are visible."""
    decoded = str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    if len(ids) > 1:
        return decoded
    piece = str(tokenizer.convert_ids_to_tokens(int(ids[0])))
    bare = piece.removeprefix("##") or piece
    spaced = bare.replace("▁", " ").replace("Ġ", " ")
    return spaced if decoded.strip() in (piece, bare, spaced.strip()) else decoded

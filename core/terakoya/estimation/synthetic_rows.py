"""Rows to try a model with where shapes are all that matters, and what stores say of rows without reading them.

Letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.random_keys import row_keys

LOOKED_AT = 1_000_000
"""Documents of a store whose lengths are looked at."""
ONE_A_ROW = ("lines", "padded")
"""Layouts that take one sequence, or document, a row."""


@dataclass(frozen=True)
class RowStatistics:
    """What rows will hold.

    Attributes:
        vocabulary: the stores', or an invented one of the size given.
        context: positions of its own document that a position has, on average.
        tokens_per_row: real tokens of a row, on average.
        rows: of an epoch over all training stores; None where the stores are not there.
        known: whether the stores are there. Else each row is taken to be full, and one document.
    """

    vocabulary: Vocabulary
    context: float
    tokens_per_row: float
    rows: int | None
    known: bool


def row_statistics(parameters: Parameters, vocab_size: int | None) -> RowStatistics:
    """What the stores of `parameters` hold, from their headers, or what `vocab_size` leaves to assume without them.

    Raises:
        UserError: a store is not there, or broken, and `vocab_size` is not given.
    """
    length = parameters.data.sequence_length
    folders = [each.store for each in parameters.data.train]
    missing = [folder for folder in folders if not (folder / "store.json").is_file()]
    if missing:
        if vocab_size is None:
            raise UserError(
                f"data.train: there is no store at {missing[0]}, whose vocabulary the model would have; prepare it, or "
                "say how many pieces it will have: --vocab-size 32768"
            )
        return RowStatistics(synthetic_vocabulary(vocab_size, length), float(length), float(length), None, known=False)
    layout = parameters.objective.row_layout()
    stores = [TokenStore.open(folder) for folder in folders]
    weights = np.array([each.weight for each in parameters.data.train])
    found = np.array([_lengths(store, layout, length) for store in stores])  # context, tokens a row, rows
    vocabulary = stores[0].facts.vocabulary
    if vocab_size is not None and vocab_size != vocabulary.size:
        vocabulary = synthetic_vocabulary(vocab_size, length)
    share = 1.0 if parameters.data.split is None else parameters.data.split[0] / sum(parameters.data.split)
    context, tokens = np.average(found[:, :2], axis=0, weights=weights)
    return RowStatistics(vocabulary, float(context), float(tokens), max(1, int(found[:, 2].sum() * share)), known=True)


def synthetic_vocabulary(size: int, sequence_length: int) -> Vocabulary:
    """A vocabulary of `size` ids that has every special token, and as many unused ones as objectives may ask for.

    Raises:
        UserError: it is too small to hold them.
    """
    if size < 16:
        raise UserError(f"--vocab-size: expected at least 16, got {size}")
    special = tuple(range(max(8, min(size // 2, 8 + sequence_length))))
    return Vocabulary(size=size, pad=0, unk=1, cls=2, sep=3, mask=4, bos=5, eos=6, special=special)


def full_rows(layout: Layout, vocabulary: Vocabulary, *, rows: int, sequence_length: int) -> Rows:
    """`rows` full rows (B, T) of one document each, as `layout` cuts them."""
    shape = (rows, sequence_length)
    tokens = np.resize(vocabulary.ordinary, shape).astype(np.int32)
    document_ids = np.zeros(shape, np.int32)
    position_ids = np.broadcast_to(np.arange(sequence_length, dtype=np.int32), shape).copy()
    keys = row_keys(0, 0, 0, np.arange(rows))
    if layout.framing == "causal":
        return Rows(tokens, document_ids, position_ids, None, keys, labels=np.roll(tokens, -1, axis=1))
    tokens[:, 0], tokens[:, -1] = vocabulary.cls or 0, vocabulary.sep or 0
    word_starts = np.ones(shape, bool)
    if layout.kind != "pairs":
        return Rows(tokens, document_ids, position_ids, word_starts, keys)
    second = np.zeros(shape, np.int32)
    second[:, sequence_length // 2 :] = 1
    tokens[:, sequence_length // 2 - 1] = vocabulary.sep or 0
    return Rows(tokens, document_ids, position_ids, word_starts, keys, second, np.zeros(rows, np.int8))


def _lengths(store: TokenStore, layout: Layout, length: int) -> Sequence[float]:
    """Context, tokens a row and rows of an epoch of `store`, from the lengths of its first documents."""
    framing = 1 if layout.framing == "causal" else 2  # an end, or [CLS] and [SEP]
    facts = store.facts
    if layout.kind in ONE_A_ROW:
        units = facts.sequences if layout.kind == "lines" else facts.documents
        found = np.minimum(_first_lengths(store, by_line=layout.kind == "lines") + framing, length).astype(float)
        return float((found**2).sum() / max(1.0, found.sum())), float(found.mean()), units
    rows = max(1, (facts.tokens + framing * facts.documents) // length)
    if layout.kind != "packed":
        return float(length), float(length), rows
    found = (_first_lengths(store, by_line=False) + framing).astype(float)
    whole, rest = np.divmod(found, length)
    return float((whole * length**2 + rest**2).sum() / found.sum()), float(length), rows


def _first_lengths(store: TokenStore, *, by_line: bool) -> np.ndarray:
    """Tokens of the first lines or documents of `store`, (n,) int64."""
    if by_line:
        return np.asarray(store.index.lengths[:LOOKED_AT], np.int64)
    documents = np.asarray(store.index.documents[: LOOKED_AT + 1], np.int64)
    offsets = np.concatenate([[0], np.cumsum(store.index.lengths[: documents[-1]], dtype=np.int64)])
    return np.diff(offsets[documents])

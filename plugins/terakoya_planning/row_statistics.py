"""Statistics of the rows of a run, from the headers of its stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.data import Data
from terakoya.errors import UserError
from terakoya.places import is_local
from terakoya.store.token_store import TokenStore, open_store

SAMPLED_DOCUMENTS = 1_000_000
"""Documents at the beginning of a store whose lengths are read."""
ONE_A_ROW = ("lines", "padded")
"""Layouts with one sequence, or document, in each row."""


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the rows of a run.

    Attributes:
        vocabulary: the stores', or a synthetic one of the given size.
        context: average number of positions of its own document that a position attends to.
        tokens_per_row: average number of real tokens in a row.
        rows: rows of an epoch over all training stores; None without stores.
        known: whether the stores exist. If not, every row is assumed to be full, and one document.
        documents_per_row: average number of documents in a row, padding included as one.
        validation_rows: rows of all validation stores; None without them.
    """

    vocabulary: Vocabulary
    context: float
    tokens_per_row: float
    rows: int | None
    known: bool
    documents_per_row: float = 1.0
    validation_rows: int | None = None


def row_statistics(data: Data, layout: Layout, vocab_size: int | None) -> RowStatistics:
    """Returns statistics from the headers of the stores of `data`, or assumptions from `vocab_size` without stores.
    Raises UserError if a store is missing or broken and `vocab_size` is not given."""
    length = data.sequence_length
    folders = [source.store for source in data.train]
    missing = [each for each in folders if is_local(each) and not (each / "store.json").is_file()]
    if missing:
        if vocab_size is None:
            raise UserError(
                f"data.train: there is no store at {missing[0]} to read the model's vocabulary from; prepare it, or "
                "give the number of tokens of its vocabulary: --vocab-size 32768"
            )
        vocabulary = synthetic_vocabulary(vocab_size, length)
        return RowStatistics(vocabulary, float(length), float(length), None, known=False)
    stores = [open_store(folder) for folder in folders]
    weights = np.array([source.weight for source in data.train])
    by_store = np.array([_store_statistics(store, layout, length) for store in stores])
    vocabulary = stores[0].facts.vocabulary
    if vocab_size is not None and vocab_size != vocabulary.size:
        vocabulary = synthetic_vocabulary(vocab_size, length)
    train_part = 1.0 if data.split is None else data.split[0] / sum(data.split)
    context, tokens, _, documents = np.average(by_store, axis=0, weights=weights)
    all_rows = by_store[:, 2].sum()
    rows = max(1, int(all_rows * train_part))
    held_out = int(all_rows) - rows if data.split is not None else _rows_of_all(data.validation, layout, length)
    return RowStatistics(
        vocabulary, float(context), float(tokens), rows, known=True, documents_per_row=float(documents),
        validation_rows=held_out,
    )  # fmt: skip


def _rows_of_all(folders: Sequence[Path], layout: Layout, length: int) -> int | None:
    """Returns the rows of the stores in `folders`; None where one of them does not exist."""
    if any(is_local(each) and not (each / "store.json").is_file() for each in folders):
        return None
    return int(sum(_store_statistics(open_store(each), layout, length)[2] for each in folders))


def _store_statistics(store: TokenStore, layout: Layout, length: int) -> Sequence[float]:
    """Returns context, tokens in a row, rows of an epoch and documents in a row of `store`, from the lengths of its
    first documents."""
    facts = store.facts
    added = 1  # an end token
    if layout.framing != "causal" and facts.vocabulary.cls is not None:
        added = 2  # [CLS] and [SEP]
    if layout.kind in ONE_A_ROW:
        units = facts.sequences if layout.kind == "lines" else facts.documents
        lengths = np.minimum(_first_lengths(store, by_line=layout.kind == "lines") + added, length).astype(float)
        context = float((lengths**2).sum() / max(1.0, lengths.sum()))
        return context, float(lengths.mean()), units, 1.0 + float((lengths < length).mean())
    rows = max(1, (facts.tokens + added * facts.documents) // length)
    if layout.kind != "packed":
        return float(length), float(length), rows, 1.0
    lengths = (_first_lengths(store, by_line=False) + added).astype(float)
    full, rest = np.divmod(lengths, length)
    context = float((full * length**2 + rest**2).sum() / lengths.sum())
    documents = float((full + (rest > 0)).sum() * length / lengths.sum()) + 1.0
    return context, float(length), rows, documents


def _first_lengths(store: TokenStore, *, by_line: bool) -> np.ndarray:
    """Returns the tokens in each of the first lines or documents of `store`, (n,) int64."""
    if by_line:
        return np.asarray(store.index.lengths[:SAMPLED_DOCUMENTS], np.int64)
    documents = np.asarray(store.index.documents[: SAMPLED_DOCUMENTS + 1], np.int64)
    offsets = np.concatenate([[0], np.cumsum(store.index.lengths[: documents[-1]], dtype=np.int64)])
    return np.diff(offsets[documents])

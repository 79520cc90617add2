"""Checks of token files that take the same short time for any size: the ends of the index, and a sample of the ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from terakoya.errors import UserError

_WINDOWS, _WINDOW = 64, 4096
"""Number of windows that are sampled, and ids in each."""


def check_ids(file: Path, start: int, ids: np.ndarray, size: int, *, remedy: str) -> None:
    """Raises UserError, ending with `remedy`, unless all `ids` are below `size`. They begin at token `start` of
    `file`."""
    if not len(ids) or (int(ids.max()) < size and int(ids.min()) >= 0):
        return
    at = int(np.flatnonzero((ids >= size) | (ids < 0))[0])
    raise UserError(
        f"{file}: token {start + at:,}: expected an id below {size:,}, the size of the tokenizer's vocabulary, got "
        f"{ids[at]:,}; {remedy}"
    )


def check_some_ids(file: Path, tokens: np.ndarray, size: int, *, remedy: str) -> None:
    """Does `check_ids` for windows of `tokens` at the beginning, at the end and evenly spaced between."""
    for start in np.unique(np.linspace(0, max(0, len(tokens) - _WINDOW), _WINDOWS).astype(np.int64)):
        check_ids(file, int(start), np.asarray(tokens[start : start + _WINDOW]), size, remedy=remedy)


def check_index_ends(
    file: Path, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, *, data_bytes: int, itemsize: int
) -> None:
    """Raises UserError unless sequences and documents begin at 0 and end where the data ends."""
    end = int(pointers[-1]) + int(lengths[-1]) * itemsize if len(lengths) else 0
    first = int(pointers[0]) if len(lengths) else 0
    if first != 0 or end != data_bytes:
        raise UserError(
            f"{file}: expected sequences from byte 0 to {data_bytes:,}, got {first:,} to {end:,}: damaged; prepare the "
            "store again"
        )
    if int(documents[0]) != 0 or int(documents[-1]) != len(lengths):
        raise UserError(
            f"{file}: expected documents from sequence 0 to {len(lengths):,}, got {int(documents[0]):,} to "
            f"{int(documents[-1]):,}: damaged; prepare the store again"
        )

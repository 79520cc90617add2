"""RowSegments of a store made into the arrays of a batch: one gather, then frames and padding written over it.

Letters: B rows, T tokens of a row, S segments of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class RowSegments:
    """Adjacent tokens of the store and what frames them, in row order; every array (S,) int64.

    `lead` is 1 where [CLS] comes before the tokens, `trail` (0 to 2) how many [SEP] come after them. `document` is
    the document's number in the row, `type` the token type.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    lead: np.ndarray
    trail: np.ndarray
    document: np.ndarray
    type: np.ndarray | None = None

    def used(self, batch: int) -> np.ndarray:
        """The tokens of each of `batch` rows, frames included, (B,) int64."""
        sizes = self.lead + self.length + self.trail
        return np.bincount(self.row, weights=sizes, minlength=batch).astype(np.int64)


@dataclass(frozen=True)
class AssembledRows:
    """Arrays (B, T) of a batch; see `terakoya.rows.row_source.Rows`."""

    tokens: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray
    word_starts: np.ndarray | None
    token_type_ids: np.ndarray | None


def assemble_rows(
    segments: RowSegments,
    shape: tuple[int, int],
    stored: np.ndarray,
    word_bits: tuple[np.ndarray, int] | None,
    *,
    pad: int,
    cls: int,
    sep: int,
    restart: bool,
) -> AssembledRows:
    """The arrays (B, T) = `shape` of segments that fit it.

    `stored` is every token of the store and `word_bits` their word starts as `TokenStore.word_bits` has them.
    Positions count from 0 in each segment with `restart`, else in each row.
    """
    batch, width = shape
    sizes = segments.lead + segments.length + segments.trail
    # Each row's segments, then one more that is its padding.
    place = np.arange(len(sizes)) + segments.row
    padding = np.cumsum(np.bincount(segments.row, minlength=batch) + 1) - 1
    total = np.empty(len(sizes) + batch, np.int64)
    total[place], total[padding] = sizes, width - segments.used(batch)
    begin = (np.cumsum(total) - total)[place]

    def spread(of_segments: np.ndarray, of_padding: int, dtype: type = np.int32) -> np.ndarray:
        each: np.ndarray = np.full(len(total), of_padding, dtype)
        each[place] = of_segments
        return np.repeat(each, total)

    # In place where it can be: fresh memory for arrays of this size costs more than the arithmetic.
    source = spread(segments.start - segments.lead - begin, 0, np.int64)
    source += _count(batch * width, np.int64)
    document_ids = spread(segments.document, -1)
    is_padding = np.flatnonzero(document_ids < 0)
    leads = begin[segments.lead > 0]
    first_trail = begin + segments.lead + segments.length
    trails = np.concatenate([first_trail[segments.trail > 0], first_trail[segments.trail > 1] + 1])
    tokens = np.take(stored, source, mode="clip").astype(np.int32)
    tokens[is_padding], tokens[leads], tokens[trails] = pad, cls, sep
    position_ids = spread(begin if restart else segments.row * width, 0)
    np.subtract(_count(batch * width, np.int32), position_ids, out=position_ids)
    position_ids[is_padding] = 0
    word_starts = None
    if word_bits is not None:
        packed, skipped = word_bits
        if skipped:
            source += skipped
        bit = np.empty(len(source), np.uint8)
        np.bitwise_and(source, 7, out=bit, casting="unsafe")
        source >>= 3
        flags = np.take(packed, source, mode="clip")
        flags >>= bit
        flags &= 1
        flags[is_padding] = flags[leads] = flags[trails] = 0
        word_starts = flags.view(bool).reshape(shape)
    return AssembledRows(
        tokens.reshape(shape),
        document_ids.reshape(shape),
        position_ids.reshape(shape),
        word_starts,
        None if segments.type is None else spread(segments.type, 0).reshape(shape),
    )


@lru_cache(maxsize=4)
def _count(number: int, dtype: type) -> np.ndarray:
    """range(number), not to be written to."""
    count: np.ndarray = np.arange(number, dtype=dtype)
    count.flags.writeable = False
    return count

"""Assembles the arrays of a batch from segments of a store: one gather, then special tokens and padding over it.

Letters: B rows, T tokens of a row, S segments of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from terakoya.components.rows import Rows


@dataclass(frozen=True)
class RowSegments:
    """Segments: adjacent tokens of the store with special tokens around them, in row order; every array (S,) int64.

    `prefix` is 1 where [CLS] comes before the tokens, `suffix` (0 to 2) is the number of [SEP] after them. `document`
    is the document's number in the row, `type` the token type.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    prefix: np.ndarray
    suffix: np.ndarray
    document: np.ndarray
    type: np.ndarray | None = None

    def row_lengths(self, batch: int) -> np.ndarray:
        """The number of tokens in each of `batch` rows, special tokens included, (B,) int64."""
        sizes = self.prefix + self.length + self.suffix
        return np.bincount(self.row, weights=sizes, minlength=batch).astype(np.int64)


def assemble_rows(
    segments: RowSegments,
    keys: np.ndarray,
    width: int,
    stored: np.ndarray,
    word_bits: tuple[np.ndarray, int] | None,
    *,
    framing_ids: tuple[int, int, int],
    restart_positions: bool,
) -> Rows:
    """The rows with these `keys` (B,), `width` tokens each, of segments that fit them.

    `stored` is every token of the store, `word_bits` their word starts in the form of `TokenStore.flag_bits`,
    `framing_ids` the ids of padding, [CLS] and [SEP]. Positions count from 0 in each segment with `restart_positions`,
    else in each row.
    """
    batch, shape = len(keys), (len(keys), width)
    sizes = segments.prefix + segments.length + segments.suffix
    # A part is a segment or the padding that follows the segments of a row.
    segment_parts = np.arange(len(sizes)) + segments.row
    padding_parts = np.cumsum(np.bincount(segments.row, minlength=batch) + 1) - 1
    part_sizes = np.empty(len(sizes) + batch, np.int64)
    part_sizes[segment_parts], part_sizes[padding_parts] = sizes, width - segments.row_lengths(batch)
    begin = (np.cumsum(part_sizes) - part_sizes)[segment_parts]

    def repeat_per_token(of_segments: np.ndarray, of_padding: int, dtype: type = np.int32) -> np.ndarray:
        values: np.ndarray = np.full(len(part_sizes), of_padding, dtype)
        values[segment_parts] = of_segments
        return np.repeat(values, part_sizes)

    # In place where possible: new memory for arrays of this size costs more than the arithmetic.
    source = repeat_per_token(segments.start - segments.prefix - begin, 0, np.int64)
    source += _count(batch * width, np.int64)
    document_ids = repeat_per_token(segments.document, -1)
    is_padding = np.flatnonzero(document_ids < 0)
    prefixes = begin[segments.prefix > 0]
    first_suffix = begin + segments.prefix + segments.length
    suffixes = np.concatenate([first_suffix[segments.suffix > 0], first_suffix[segments.suffix > 1] + 1])
    tokens = np.take(stored, source, mode="clip").astype(np.int32)
    tokens[is_padding], tokens[prefixes], tokens[suffixes] = framing_ids
    position_ids = repeat_per_token(begin if restart_positions else segments.row * width, 0)
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
        flags[is_padding] = flags[prefixes] = flags[suffixes] = 0
        word_starts = flags.view(bool).reshape(shape)
    return Rows(
        tokens.reshape(shape),
        document_ids.reshape(shape),
        position_ids.reshape(shape),
        word_starts,
        keys,
        None if segments.type is None else repeat_per_token(segments.type, 0).reshape(shape),
    )


@lru_cache(maxsize=4)
def _count(number: int, dtype: type) -> np.ndarray:
    """np.arange(number), read-only."""
    count: np.ndarray = np.arange(number, dtype=dtype)
    count.flags.writeable = False
    return count

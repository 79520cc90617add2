"""Rows with shapes but no meaning, to run a model on.

Letters: B rows, T positions.
"""

from __future__ import annotations

import numpy as np

from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.random_keys import row_keys


def synthetic_vocabulary(size: int, sequence_length: int) -> Vocabulary:
    """Returns a vocabulary of `size` ids with every special token, and as many unused ones as objectives may need.
    Raises UserError if `size` is too small for the special tokens."""
    if size < 16:
        raise UserError(f"--vocab-size: expected at least 16, got {size}")
    special = tuple(range(max(8, min(size // 2, 8 + sequence_length))))
    return Vocabulary(size=size, pad=0, unk=1, cls=2, sep=3, mask=4, bos=5, eos=6, special=special)


def full_rows(layout: Layout, vocabulary: Vocabulary, *, rows: int, sequence_length: int) -> Rows:
    """Returns `rows` full rows (B, T) of one document each, in the form of `layout`."""
    shape = (rows, sequence_length)
    tokens = np.resize(vocabulary.ordinary, shape).astype(np.int32)
    document_ids = np.zeros(shape, np.int32)
    position_ids = np.broadcast_to(np.arange(sequence_length, dtype=np.int32), shape).copy()
    keys = row_keys(0, 0, 0, np.arange(rows))
    if layout.framing == "causal":
        return Rows(tokens, document_ids, position_ids, None, keys, labels=np.roll(tokens, -1, axis=1))
    if layout.framing == "encoder" or vocabulary.cls is not None:
        tokens[:, 0] = vocabulary.cls or 0
    tokens[:, -1] = vocabulary.encoder_end or 0
    word_starts = np.ones(shape, bool)
    if layout.kind != "pairs":
        return Rows(tokens, document_ids, position_ids, word_starts, keys)
    second = np.zeros(shape, np.int32)
    second[:, sequence_length // 2 :] = 1
    tokens[:, sequence_length // 2 - 1] = vocabulary.sep or 0
    return Rows(tokens, document_ids, position_ids, word_starts, keys, second, np.zeros(rows, np.int8))

"""Rows of random documents, and batches of them as a module takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from terakoya.components import Batch
from terakoya.components.rows import Rows
from terakoya.components.vocabulary import Vocabulary

VOCABULARY = Vocabulary(size=60, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))


def rows(lengths: Sequence[Sequence[int]], width: int = 24, *, first_key: int = 1) -> Rows:
    """Packed rows: each inner list holds the lengths of a row's documents, including [CLS] and [SEP]."""
    generator = np.random.default_rng(3)
    tokens = np.zeros((len(lengths), width), np.int32)
    documents = np.full((len(lengths), width), -1, np.int32)
    positions = np.zeros((len(lengths), width), np.int32)
    for row, documents_of_row in enumerate(lengths):
        at = 0
        for number, length in enumerate(documents_of_row):
            tokens[row, at : at + length] = [2, *generator.integers(5, 60, length - 2), 3]
            documents[row, at : at + length] = number
            positions[row, at : at + length] = np.arange(length)
            at += length
    starts = np.random.default_rng(4).random(tokens.shape) < 0.6
    keys = np.arange(first_key, first_key + len(lengths), dtype=np.uint64)
    return Rows(tokens=tokens, document_ids=documents, position_ids=positions, word_starts=starts, keys=keys)


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.arrays.items()}


def corrupted_documents(rows: Rows, batch: Batch) -> Iterator[tuple[list[int], list[int], list[int], list[int]]]:
    """Each document's tokens, and its encoder input, decoder input and labels in a batch of span corruption."""
    arrays = batch.arrays
    for row in range(len(rows)):
        for number in range(rows.document_ids[row].max() + 1):
            targets = arrays["decoder_document_ids"][row] == number
            yield (
                rows.tokens[row][rows.document_ids[row] == number].tolist(),
                arrays["input_ids"][row][arrays["document_ids"][row] == number].tolist(),
                arrays["decoder_input_ids"][row][targets].tolist(),
                arrays["labels"][row][targets].tolist(),
            )

"""Rows of toy documents, and the difference of two tensors: shared by the checks of architectures.

Letters in shapes: B rows, T positions, S positions of a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terakoya_contract.toy import VOCABULARY

ENCODER = ("input_ids", "document_ids", "position_ids")
DECODER = ("decoder_input_ids", "decoder_document_ids")


def make_row(*lengths: int, padding: int = 0, seed: int = 1) -> dict[str, Tensor]:
    """A row (1, T) of random documents of `lengths`, then `padding` positions, also with random ids."""
    total = sum(lengths) + padding
    return {
        "input_ids": _ids(total, seed),
        "document_ids": _document_ids(lengths, padding),
        "position_ids": torch.cat([torch.arange(each) for each in (*lengths, padding)])[None],
    }


def add_target(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`batch` (1, T) with the decoder's inputs, `decoder_input_ids` and `decoder_document_ids` (1, S): for n tokens of
    a document n // 2 + 1 random ids, and half as much padding as the batch has."""
    documents = batch["document_ids"][0]
    lengths = [int((documents == number).sum()) // 2 + 1 for number in range(int(documents.max()) + 1)]
    padding = (int((documents < 0).sum()) + 1) // 2
    return {
        **batch,
        "decoder_input_ids": _ids(sum(lengths) + padding, seed=2),
        "decoder_document_ids": _document_ids(lengths, padding),
    }


def single_document(batch: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The document `number` of the row `batch`, without its neighbours."""
    document: dict[str, Tensor] = {}
    for names, ids in ((ENCODER, "document_ids"), (DECODER, "decoder_document_ids")):
        document |= {name: batch[name][:, batch[ids][0] == number] for name in names if name in batch}
    return document


def output_document_ids(batch: Mapping[str, Tensor]) -> Tensor:
    """The document ids of the positions that have hidden states: (B, T), or with a decoder (B, S)."""
    return batch.get("decoder_document_ids", batch["document_ids"])


def difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference, relative to the larger of 1 and the largest absolute value of `other`."""
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))


def _ids(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(VOCABULARY.special), VOCABULARY.size, (1, count), generator=generator)


def _document_ids(lengths: tuple[int, ...] | list[int], padding: int) -> Tensor:
    documents = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return torch.cat([*documents, torch.full((padding,), -1)])[None]

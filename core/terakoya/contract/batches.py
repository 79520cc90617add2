"""Rows of toy documents, and how far two tensors are apart: what looks at architectures have in common.

Letters in shapes: B rows, T positions, S positions of a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terakoya.contract.toy import VOCABULARY

ENCODER = ("input_ids", "document_ids", "position_ids")
DECODER = ("decoder_input_ids", "decoder_document_ids")


def row(*lengths: int, padding: int = 0, seed: int = 1) -> dict[str, Tensor]:
    """A row of random documents of `lengths`, then `padding` places with random ids too."""
    total = sum(lengths) + padding
    return {
        "input_ids": _ids(total, seed),
        "document_ids": _numbers(lengths, padding),
        "position_ids": torch.cat([torch.arange(each) for each in (*lengths, padding)])[None],
    }


def with_target(batch: Mapping[str, Tensor], *, seed: int = 2) -> dict[str, Tensor]:
    """`batch` (1, T) with what a decoder is to read of each document, `decoder_input_ids` and `decoder_document_ids`
    (1, S): random ids, half as many and one more, and padding as the batch has it."""
    documents = batch["document_ids"][0]
    lengths = [int((documents == number).sum()) // 2 + 1 for number in range(int(documents.max()) + 1)]
    padding = (int((documents < 0).sum()) + 1) // 2
    return {
        **batch,
        "decoder_input_ids": _ids(sum(lengths) + padding, seed),
        "decoder_document_ids": _numbers(lengths, padding),
    }


def alone(batch: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The document `number` of the row `batch`, without its neighbours."""
    found: dict[str, Tensor] = {}
    for names, documents in ((ENCODER, "document_ids"), (DECODER, "decoder_document_ids")):
        found |= {name: batch[name][:, batch[documents][0] == number] for name in names if name in batch}
    return found


def answered(batch: Mapping[str, Tensor]) -> Tensor:
    """The document ids (B, T) or, with a decoder, (B, S), of the places that hidden states are made for."""
    return batch.get("decoder_document_ids", batch["document_ids"])


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, relative to the larger of 1 and the largest value."""
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))


def _ids(count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(len(VOCABULARY.special), VOCABULARY.size, (1, count), generator=draw)


def _numbers(lengths: tuple[int, ...] | list[int], padding: int) -> Tensor:
    documents = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return torch.cat([*documents, torch.full((padding,), -1)])[None]

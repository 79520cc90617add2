"""Causal attention document by document, for a CPU.

A mask saves no work on a CPU: torch's kernel computes all scores of a row and then hides those of other documents.
Split into documents, a row of T tokens costs as much as its documents, and no document needs a mask. On a GPU the
variable-length kernel does the same.

Letters in shapes: B rows, T positions, N heads, D size of a head, n positions of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None]]
"""Attention in a row that is one document: query, key and value (1, N, n, D) to (1, n, N, D), without weights."""


def lengths(document_ids: Tensor) -> list[int]:
    """Returns the number of positions of each document, one row after the other; the sum is B * T.

    `document_ids` (B, T) is on the host, -1 for padding: the padding of a row counts as a document.
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = starts.flatten().nonzero().flatten().tolist()
    return [after - begin for begin, after in zip(begins, [*begins[1:], document_ids.numel()], strict=True)]


def by_document(attend: Attend, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Applies `attend` to each document of the rows `query`, `key`, `value` (B, N, T, D); returns (B, T, N, D).
    `lengths` is the result of the function `lengths`."""
    queries, keys, values = (_documents(states, lengths) for states in (query, key, value))
    attended = [attend(*document)[0] for document in zip(queries, keys, values, strict=True)]
    return torch.cat(attended, dim=1)[0].unflatten(0, (query.shape[0], query.shape[2]))


def _documents(states: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Returns the documents, (1, N, n, D) each, of the rows `states` (B, N, T, D)."""
    flat = states.transpose(1, 2).flatten(0, 1)
    return [document.transpose(0, 1)[None] for document in flat.split(lengths)]

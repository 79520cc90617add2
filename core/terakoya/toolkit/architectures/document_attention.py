"""Causal attention document by document, for a CPU.

There a mask saves nothing: torch's kernel computes all scores of a row and then hides those of other documents. Cut
into documents, a row of T tokens costs what its documents do, and none needs a mask. On a GPU the variable-length
kernel does the same.

Letters in shapes: B rows, T positions, N heads, D size of a head, n positions of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None]]
"""Attention in rows that are one document each: query, key and value (1, N, n, D) to (1, n, N, D), and no weights."""


def lengths(document_ids: Tensor) -> list[int]:
    """How many positions each document of the rows takes, one row after the other, summing up to B * T.

    `document_ids` (B, T) on the host, -1 for padding: the padding of a row counts as a document.
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = starts.flatten().nonzero().flatten().tolist()
    return [after - begin for begin, after in zip(begins, [*begins[1:], document_ids.numel()], strict=True)]


def by_document(attend: Attend, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """What `attend` makes of each document of the rows `query`, `key`, `value` (B, N, T, D), side by side again as
    (B, T, N, D); `lengths` as the function of that name says."""
    queries, keys, values = (_documents(states, lengths) for states in (query, key, value))
    attended = [attend(*document)[0] for document in zip(queries, keys, values, strict=True)]
    return torch.cat(attended, dim=1)[0].unflatten(0, (query.shape[0], query.shape[2]))


def _documents(states: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The documents, (1, N, n, D) each, of the rows `states` (B, N, T, D)."""
    flat = states.transpose(1, 2).flatten(0, 1)
    return [document.transpose(0, 1)[None] for document in flat.split(lengths)]

"""Local attention in blocks of positions, for a CPU.

torch's kernel there computes all scores of a row, also those that a mask hides. In blocks of queries, each beside the
keys that its windows reach, a row of T tokens costs T * K scores instead of T * T.

Letters in shapes: B rows, T positions, N heads, D size of a head; n blocks of S positions, each of which sees R
positions to each side; K = S + 2 R keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_BLOCK = 32
"""With a reach of 8 in rows of 512, blocks of 16, 32, 64 and 128 positions took 16, 13, 15, 20 ms (EPYC, AVX-512)."""


def block_size(length: int, reach: int) -> int | None:
    """Returns the positions of a block in rows of `length`; None where blocks do not save half of the scores."""
    size = max(SMALLEST_BLOCK, 1 << (reach - 1).bit_length())
    return size if length % size == 0 and 2 * (size + 2 * reach) <= length else None


def by_block(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, size: int, reach: int
) -> Tensor:
    """Applies `attend` to the blocks of `size` positions of `query`, `key`, `value` (B, N, T, D), with the parts of
    `mask` (B, 1, T, T) that they see; returns (B, N, T, D). The mask hides all beyond `reach`."""
    parts = _cut(query, size), _with_neighbours(_cut(key, size), reach), _with_neighbours(_cut(value, size), reach)
    seen = F.pad(mask[:, 0], (reach, reach)).unflatten(1, (-1, size)).unfold(3, size + 2 * reach, size)
    seen = seen.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)[:, None]  # (B n, 1, S, K)
    attended = attend(*(part.flatten(0, 1).transpose(1, 2) for part in parts), seen)
    return attended.transpose(1, 2).unflatten(0, (query.shape[0], -1)).flatten(1, 2).transpose(1, 2)


def _cut(states: Tensor, size: int) -> Tensor:
    """Returns the blocks (B, n, S, N, D) of `states` (B, N, T, D)."""
    return states.transpose(1, 2).unflatten(1, (-1, size))


def _with_neighbours(blocks: Tensor, reach: int) -> Tensor:
    """Returns `blocks` (B, n, S, N, D) with the next `reach` positions on either side, (B, n, K, N, D); zeros beyond
    the row."""
    none = blocks.new_zeros(blocks.shape[0], 1, reach, *blocks.shape[3:])
    before = torch.cat([none, blocks[:, :-1, blocks.shape[2] - reach :]], dim=1)
    after = torch.cat([blocks[:, 1:, :reach], none], dim=1)
    return torch.cat([before, blocks, after], dim=2)

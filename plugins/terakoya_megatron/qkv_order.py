"""The order of queries, keys and values in one fused matrix, which depends on the version of Megatron's checkpoint."""

from __future__ import annotations

from torch import Tensor


def reorder(fused: Tensor, *, version: float, heads: int, head_size: int) -> Tensor:
    """Returns `fused` (3 N S, ...) in the order of version 2 and later: per head its query, key and value.

    Version 0 has all queries, then all keys, then all values; version 1 interleaves the three within each head.
    `heads` is the number of heads of this tensor-parallel rank, because each rank's shard has this order separately.
    """
    rest = fused.shape[1:]
    if version >= 2:
        return fused
    if version >= 1:
        return fused.reshape(heads, head_size, 3, *rest).transpose(1, 2).reshape(-1, *rest)
    return fused.reshape(3, heads, head_size, *rest).transpose(0, 1).reshape(-1, *rest)

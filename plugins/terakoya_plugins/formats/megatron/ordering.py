"""The order of queries, keys and values in one matrix, by the version of Megatron's checkpoint."""

from __future__ import annotations

from torch import Tensor


def modern(fused: Tensor, *, version: float, heads: int, head_size: int) -> Tensor:
    """`fused` (3 N S, ...) in the order of version 2 and later: head by head, its query, key and value.

    Version 0 has all queries, then all keys, then all values; version 1 has the three interleaved within each head.
    `heads` are those of this tensor-parallel rank: each rank's part is ordered for itself.
    """
    rest = fused.shape[1:]
    if version >= 2:
        return fused
    if version >= 1:
        return fused.reshape(heads, head_size, 3, *rest).transpose(1, 2).reshape(-1, *rest)
    return fused.reshape(3, heads, head_size, *rest).transpose(0, 1).reshape(-1, *rest)

"""Shards of a model's tensors: where each shard is in its tensor, and which process writes a shard that many hold.

Nothing here communicates: every process computes the same assignment from the names and sizes of the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from torch import Tensor

from terakoya.components.tensor_shard import TensorShard as TensorShard

Kind = Literal["model", "optimizer"]
KINDS: tuple[Kind, ...] = ("model", "optimizer")
"""The two halves of a checkpoint's `state/`: parameters with buffers, and the optimizer's state of them."""

BLOCK_BYTES = 4 << 20
"""Shards that many processes hold are assigned in blocks of at most this size, or one row where a row is larger."""


def whole_shard(name: str, value: Tensor) -> TensorShard:
    """A shard that is the whole tensor `value`."""
    return TensorShard(name, value, tuple(value.shape), (0,) * value.ndim)


def assign_shards(shards: Iterable[TensorShard], index: int, count: int) -> Iterator[TensorShard]:
    """Yields the part of `shards`, which `count` processes all hold, that process `index` of these writes.

    Each block (a shard or some rows of it) goes to the process with the fewest bytes so far, so each element is written
    once and the processes' totals differ by at most one block. Shards are sorted by name first, so that the order in
    which a process holds them does not matter.
    """
    assigned_bytes = [0] * count
    for shard in sorted(shards, key=lambda shard: (shard.name, str(shard.start))):
        for block in _blocks(shard) if count > 1 else [shard]:
            least = assigned_bytes.index(min(assigned_bytes))
            assigned_bytes[least] += block.nbytes
            if least == index:  # the block gets memory of its own: the whole tensor may soon be freed
                yield block if block is shard else replace(block, value=block.value.clone())


def _blocks(shard: TensorShard) -> Iterator[TensorShard]:
    """Cuts `shard` along its first dimension."""
    value, start = shard.value, shard.start
    if shard.nbytes <= BLOCK_BYTES or not value.ndim:
        yield shard
        return
    rows = max(1, BLOCK_BYTES * len(value) // shard.nbytes)
    for first in range(0, len(value), rows):
        block_start = start + first if isinstance(start, int) else (start[0] + first, *start[1:])
        yield TensorShard(shard.name, value[first : first + rows], shard.shape, block_start)

"""Shards of a model's tensors: the two kinds of them, and which process writes a shard that many hold.

Nothing here communicates: every process computes the same assignment from the names and sizes of the shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from terakoya.components import Optimizer
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


def whole_names(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> frozenset[str]:
    """Returns the names of the parameters that `optimizer` must see whole: those of the `groups` that it built which
    are not elementwise. `names` are by the parameters' ids."""
    return frozenset(
        names[id(each)]
        for group in groups
        if not group.get("elementwise", optimizer.elementwise)
        for each in group["params"]
    )


def assign_owners(shapes: Mapping[str, tuple[int, ...]], processes: int) -> dict[str, int]:
    """Returns the owner of each tensor: the largest first, each goes to the process with the fewest elements so far."""
    elements = [0] * processes
    owners = {}
    for name in sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name)):
        owners[name] = elements.index(min(elements))
        elements[owners[name]] += math.prod(shapes[name])
    return owners

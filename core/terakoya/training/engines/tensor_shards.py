"""Shards of a model's tensors: where each shard is in its tensor, and which process writes a shard that many hold.

Nothing here communicates: every process computes the same assignment from the names and sizes of the shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from terakoya.components import Optimizer
from terakoya.components.tensor_shard import TensorShard as TensorShard
from terakoya.distributed.topology import split_evenly

Kind = Literal["model", "optimizer"]
KINDS: tuple[Kind, ...] = ("model", "optimizer")
"""The two halves of a checkpoint's `state/`: parameters with buffers, and the optimizer's state of them."""

BLOCK_BYTES = 4 << 20
"""Shards that many processes hold are assigned in blocks of at most this size, or one row where a row is larger."""


class Box(NamedTuple):
    """A box of a tensor: its first corner, and its size in each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def narrow(self, axis: int, first: int, size: int) -> Box:
        """Returns the part that begins at `first` within this box along `axis`, `size` elements wide."""
        start, sizes = list(self.start), list(self.size)
        start[axis] += first
        sizes[axis] = size
        return Box(tuple(start), tuple(sizes))


@dataclass(frozen=True)
class TensorPart:
    """Where the values that a process holds are in a whole tensor: in boxes, which it holds side by side.

    Attributes:
        shape: the whole tensor's shape.
        boxes: at least one, which may be empty.
        axis: the dimension along which the boxes are side by side; they are equally large in all others.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    axis: int = 0

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Self:
        """The part that is the whole tensor."""
        shape = tuple(shape)
        return cls(shape, (Box((0,) * len(shape), shape),))

    def divide(self, axis: int, index: int, count: int, *, matrices: int = 1) -> TensorPart:
        """Part `index` of `count` nearly equal parts of a whole tensor along `axis`. With several `matrices` side by
        side along it, each of them is divided."""
        (box,) = self.boxes
        size = self.shape[axis] // matrices
        first, last = split_evenly(size, count, index)
        boxes = (box.narrow(axis, matrix * size + first, last - first) for matrix in range(matrices))
        return TensorPart(self.shape, tuple(boxes), axis)

    def rows(self, index: int, count: int) -> TensorPart:
        """The rows of this part that process `index` of `count` holds under `fully_shard`: ceil(n / count) of n; the
        last ones may hold fewer, or none."""
        size = -(-self.local_shape[0] // count)
        boxes, before = [], 0
        for box in self.boxes:
            first, last = (min(max(row - before, 0), box.size[0]) for row in (index * size, (index + 1) * size))
            boxes.append(box.narrow(0, first, last - first))
            before += 0 if self.axis else box.size[0]  # rows of boxes that are side by side along another axis
        return replace(self, boxes=tuple(boxes))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the values that the process holds."""
        shape = list(self.boxes[0].size)
        if shape:
            shape[self.axis] = sum(box.size[self.axis] for box in self.boxes)
        return tuple(shape)

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this part of the `whole` tensor, in its own memory."""
        if not self.shape:
            return whole.clone()
        slices = [tuple(slice(at, at + size) for at, size in zip(*box, strict=True)) for box in self.boxes]
        return torch.cat([whole[each] for each in slices], self.axis)

    def shards(self, name: str, own: Tensor) -> Iterator[TensorShard]:
        """Yields the values `own` that the process holds of the tensor `name`, a shard for each box with elements."""
        pieces = own.split([box.size[self.axis] for box in self.boxes], self.axis) if len(self.boxes) > 1 else [own]
        for box, piece in zip(self.boxes, pieces, strict=True):
            if piece.numel():
                yield TensorShard(name, piece, self.shape, box.start)


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

"""Where the values that a process holds are in a whole tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from terakoya.components import TensorShard
from terakoya.distributed.topology import split_evenly


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

"""The parts of a model's tensors that processes hold: where each lies in the whole, and who writes what many hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Kind = Literal["model", "optimizer"]
KINDS: tuple[Kind, ...] = ("model", "optimizer")
"""The two halves of a checkpoint's `state/`: parameters with buffers, and what the optimizer keeps of them."""

BLOCK_BYTES = 4 << 20
"""What many processes hold is dealt to them in blocks of at most this size, or a row where that is larger."""


@dataclass(frozen=True)
class TensorShard:
    """A part of one tensor.

    Attributes:
        name: the whole tensor's.
        value: the part: (n,) where `start` is a number, else a box with as many dimensions as the whole.
        shape: the whole tensor's.
        start: which element of the flattened whole the part begins with, or the box's first corner.
    """

    name: str
    value: Tensor
    shape: tuple[int, ...]
    start: int | tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the part."""
        return self.value.numel() * self.value.element_size()

    @property
    def is_whole(self) -> bool:
        """Whether the part is all of the tensor."""
        return self.value.numel() == math.prod(self.shape)


def whole_shard(name: str, value: Tensor) -> TensorShard:
    """All of a tensor as a piece."""
    return TensorShard(name, value, tuple(value.shape), (0,) * value.ndim)


def assign_shards(pieces: Iterable[TensorShard], holder: int, holders: int) -> Iterator[TensorShard]:
    """Of `pieces`, which `holders` processes hold alike, those that the process `holder` writes.

    Every block, a piece or some rows of it, is given to the one that has least until then: so all is written once, and
    shares differ by a block at most. Pieces are dealt by their names, in whatever order a process has them.
    """
    given = [0] * holders
    for piece in sorted(pieces, key=lambda piece: (piece.name, str(piece.start))):
        for block in _blocks(piece) if holders > 1 else [piece]:
            least = given.index(min(given))
            given[least] += block.nbytes
            if least == holder:  # a block of its own memory: the whole may be about to go
                yield block if block is piece else replace(block, value=block.value.clone())


def _blocks(piece: TensorShard) -> Iterator[TensorShard]:
    """`piece` cut along its first dimension."""
    value, start = piece.value, piece.start
    if piece.nbytes <= BLOCK_BYTES or not value.ndim:
        yield piece
        return
    rows = max(1, BLOCK_BYTES * len(value) // piece.nbytes)
    for first in range(0, len(value), rows):
        there = start + first if isinstance(start, int) else (start[0] + first, *start[1:])
        yield TensorShard(piece.name, value[first : first + rows], piece.shape, there)

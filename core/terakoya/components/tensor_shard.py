"""A part of one tensor: what a process holds of it, and what it writes into a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """A part of one tensor.

    Attributes:
        name: the whole tensor's name.
        value: the part: (n,) where `start` is a number, else a box with as many dimensions as the whole tensor.
        shape: the whole tensor's shape.
        start: index of the part's first element in the flattened tensor, or the first corner of the box.
    """

    name: str
    value: Tensor
    shape: tuple[int, ...]
    start: int | tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.value.numel() * self.value.element_size()

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return self.value.numel() == math.prod(self.shape)

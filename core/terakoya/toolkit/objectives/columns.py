"""What the columns of logits stand for where they are not simply the vocabulary: a head may have further columns
(`padded_head`), and each of several processes may have those of a part of the vocabulary (`parallel.tp_size`).

Letters: N rows, W columns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from terakoya.toolkit.attributes import replace_attribute


class Group(Protocol):
    """Processes that divide a vocabulary, seen from one of them: number `index` of `size`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """Returns the sum, or else the largest, of all processes' `values`, the same bits on each."""


@dataclass
class VocabularyPart:
    """The part of a vocabulary whose rows of embeddings and of the head this process has.

    Attributes:
        first: its first id.
        count: number of its ids, which follow each other.
        size: number of all ids.
        group: the processes that have the other parts.
        is_alone: whether the head returns this part's logits only, and not those of all parts.
    """

    first: int
    count: int
    size: int
    group: Group
    is_alone: bool = False

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the number of each of `ids` within this part, and whether it is in another part, where the number is
        0. The number of an id that no part has is none of this part either: looking it up is an error."""
        elsewhere = (ids >= 0) & (ids < self.size) & ((ids < self.first) | (ids >= self.first + self.count))
        return (ids - self.first).masked_fill(elsewhere, 0), elsewhere

    def alone(self) -> AbstractContextManager[None]:
        """While open, `is_alone`."""
        return replace_attribute(self, "is_alone", True)


@dataclass(frozen=True)
class Columns:
    """The columns of logits (N, W).

    Attributes:
        classes: number of columns that stand for an id; they are the first ones.
        part: the ids that they stand for; None where these are all.
    """

    classes: int
    part: VocabularyPart | None = None


def without_padding(logits: Tensor, columns: Columns | None) -> Tensor:
    """Returns the columns of `logits` (N, W) that stand for ids; None stands for all."""
    return logits if columns is None else logits[:, : columns.classes]


def values_at(values: Tensor, ids: Tensor, columns: Columns | None) -> Tensor:
    """Returns the value (N,) at each row's id of `ids` (N,) in `values` (N, C), of all parts."""
    if columns is None or columns.part is None:
        return values.gather(1, ids[:, None])[:, 0]
    column, elsewhere = columns.part.locate(ids)
    return columns.part.group.all_reduce(values.gather(1, column[:, None])[:, 0].masked_fill(elsewhere, 0.0))


def most_likely(logits: Tensor, columns: Columns | None) -> Tensor:
    """Returns the id (N,) int64 with the largest logit of each row; of equal ones in two parts, the lower one."""
    own = without_padding(logits, columns)
    if columns is None or columns.part is None:
        return own.argmax(-1)
    part = columns.part
    largest, ids = own.max(-1)
    is_found = largest == part.group.all_reduce(largest, largest=True)
    # the lowest id is the largest of negative ones
    return -part.group.all_reduce(torch.where(is_found, -(ids + part.first), -part.size), largest=True)

"""The facts of a vocabulary that training needs, so that training never opens a tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
from pydantic import BaseModel, ConfigDict

from terakoya.errors import UserError


def vocabulary_size(ids: Collection[int]) -> int:
    """Returns the size of a vocabulary with the pieces `ids`: the largest id and one more.

    Raises UserError for an id far beyond the number of pieces: a model would have an embedding for every number below.
    """
    largest = max(ids, default=-1)
    if largest > 2 * len(ids) + 1000:
        raise UserError(
            f"tokenizer: expected ids below about {len(ids):,}, the number of its pieces, got {largest:,}; correct the "
            "id of that piece in the tokenizer's files"
        )
    return largest + 1


class Vocabulary(BaseModel):
    """The size of a vocabulary and its special ids. Stored in `store.json`.

    `special` lists every id that never stands for text (padding, [CLS], unused slots, ...): such ids are never masked
    and never drawn as random replacements.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    special: tuple[int, ...] = ()

    @property
    def end(self) -> int | None:
        """The id that ends a document in a causal model: the end-of-sequence token, or [SEP] if there is none."""
        return self.sep if self.eos is None else self.eos

    @cached_property
    def is_special(self) -> np.ndarray:
        """(size,) bool: True where an id is special."""
        table = np.zeros(self.size, dtype=bool)
        table[list(self.special)] = True
        return table

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids (n,) int32 that are not special, ascending: random replacements are drawn from these."""
        return np.flatnonzero(~self.is_special).astype(np.int32)

    def dtype(self) -> np.dtype:
        """Returns the stored type of an id: uint16 below 65,500 ids, else int32 (Megatron-LM's rule)."""
        return np.dtype(np.uint16 if self.size < 65_500 else np.int32)


def planned_vocabulary(size: int, pieces: Mapping[str, str], further: Sequence[str] = ()) -> Vocabulary:
    """Returns a vocabulary of `size` ids, of which the special ones come first, for a tokenizer that is not trained
    yet. Only which special ids there are is as in the trained one.

    Args:
        pieces: role (`pad`, `mask`, ...) -> special piece; roles may share a piece.
        further: special pieces without a role.
    """
    ids = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces.values(), *further]))}
    roles = {role: ids[piece] for role, piece in pieces.items()}
    return Vocabulary(size=max(size, len(ids) + 1), special=tuple(ids.values()), **roles)

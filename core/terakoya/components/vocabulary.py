"""The facts of a vocabulary that training needs, so that training never opens a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from terakoya.errors import UserError

_RESERVED = (
    re.compile(r"<extra_id_(\d+)>"),
    re.compile("\u2581" + r"<extra_id_(\d+)>"),
    re.compile(r"[\[<]unused(\d+)[\]>]"),
)
"""Pieces that are reserved for training: T5's sentinels, those of mT5, which begin with SentencePiece's mark of a
space, and unused slots."""


def vocabulary_size(ids: Collection[int]) -> int:
    """Returns the size of a vocabulary with the pieces `ids`: the largest id and one more. Raises UserError for an id
    far beyond the number of pieces: a model would have an embedding for every number below."""
    largest = max(ids, default=-1)
    if largest > 2 * len(ids) + 1000:
        raise UserError(
            f"tokenizer: expected ids below about {len(ids):,}, the number of its pieces, got {largest:,}; correct the "
            "id of that piece in the tokenizer's files"
        )
    return largest + 1


def reserved_ids(pieces: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Returns the ids among `pieces` (piece -> id) that are reserved for training, by kind: `<extra_id_N>`,
    `▁<extra_id_N>`, `[unusedN]` or `<unusedN>`. Those of a kind are in the order of their N."""
    kinds = []
    for pattern in _RESERVED:
        matches = ((pattern.fullmatch(piece), id) for piece, id in pieces.items())
        kinds.append(tuple(id for _, id in sorted((int(match[1]), id) for match, id in matches if match)))
    return kinds


def sentinel_ids(pieces: Mapping[str, int]) -> tuple[int, ...]:
    """Returns `Vocabulary.sentinels` of a vocabulary with `pieces` (piece -> id): the first kind that it has."""
    return next((ids for ids in reserved_ids(pieces) if ids), ())


class Vocabulary(BaseModel):
    """The size of a vocabulary and its special ids. Stored in `store.json`.

    `special` lists every id that never stands for text (padding, [CLS], unused slots, ...): such ids are never masked
    and never drawn as random replacements. `sentinels` lists the ids that may replace a span of text, in the order of
    use: those of `<extra_id_0>`, `<extra_id_1>`, ..., or of unused slots where there is none of these. None is not
    recorded.
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
    sentinels: tuple[int, ...] | None = None

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_recorded(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fingerprints of stores that do not record sentinels stay as they are."""
        fields: dict[str, Any] = serialise(self)
        if self.sentinels is None:
            fields.pop("sentinels", None)
        return fields

    @property
    def end(self) -> int | None:
        """The id that ends a document in a causal model: the end-of-sequence token, or [SEP] if there is none."""
        return self.sep if self.eos is None else self.eos

    @property
    def encoder_end(self) -> int | None:
        """The id that ends a document in an encoder: [SEP], or the end-of-sequence token if there is none."""
        return self.eos if self.sep is None else self.sep

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
    return Vocabulary(size=max(size, len(ids) + 1), special=tuple(ids.values()), sentinels=sentinel_ids(ids), **roles)

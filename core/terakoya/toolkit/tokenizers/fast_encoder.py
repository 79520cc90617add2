"""Encoders that are faster than `tokenizers` for a kind of its models, where their ids are the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from terakoya.errors import UserError

_CHECKED = 1000
"""The characters of each batch that both encode."""


class FastEncoder(ABC):
    """An encoder in the place of a tokenizer of `tokenizers`. `find_fast_encoder` compares the ids first."""

    name: ClassVar[str]
    without: ClassVar[str]
    """How a user does without it."""
    library: ClassVar[str] = "tokenizers"
    """What it stands in for."""

    def __init__(self, backend: Any, *, split: bool) -> None:
        """`split`: whether special tokens in text are ordinary text."""
        self.backend, self.split = backend, split

    @classmethod
    @abstractmethod
    def of(cls, backend: Any, *, split: bool) -> Self | None:
        """Returns the encoder; None where what it needs is not here. Raises ValueError or NotImplementedError where it
        does not read `backend`."""

    @abstractmethod
    def rows(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each line. Raises ValueError where a line cannot be encoded."""

    def encode(self, lines: Sequence[str]) -> list[np.ndarray] | None:
        """Returns the ids of each line; None where a line cannot be encoded, of which the library says why. Raises
        UserError if the beginning of a line in the middle has other ids by `tokenizers`."""
        try:
            rows = self.rows(lines)
        except ValueError:
            return None
        begin = [lines[len(lines) // 2][:_CHECKED]] if lines else []
        if self.differing(begin) is not None:
            raise UserError(
                f"{self.name} and {self.library} give other ids for the text {begin[0]!r}; {self.without}, and prepare "
                "again from the beginning"
            )
        return rows

    def library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the library's ids of each of `texts`."""
        self.backend.encode_special_tokens = self.split
        return [each.ids for each in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def differing(self, texts: Sequence[str]) -> str | None:
        """Returns the first of `texts` with other ids by the library, None if there is none."""
        rows = zip(texts, self.rows(texts), self.library_ids(texts), strict=True)
        return next((text for text, row, other in rows if row.tolist() != other), None)

"""Finding added and special tokens in a text, exactly as Transformers' slow tokenizers do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import AddedToken


class Segment(NamedTuple):
    """A part of a text.

    Attributes:
        text: its characters.
        positions: the position of each of them in the whole text.
        token: the id of the token that the segment is; None where it is text.
    """

    text: str
    positions: Sequence[int]
    token: int | None


class AddedTokens:
    """The tokens that are taken out of a text before its words are split."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        """`tokens` are the added tokens by their ids."""
        try:
            from transformers.tokenization_python import Trie
        except ModuleNotFoundError:  # Transformers 4
            from transformers.tokenization_utils import Trie

        self.contents = {id: str(token) for id, token in tokens.items()}
        self._tokens = {str(token): token for token in tokens.values()}
        self._ids = {str(token): id for id, token in tokens.items()}
        self._trie = Trie()
        for content in self._ids:
            self._trie.add(content)
        self._any = re.compile("|".join(map(re.escape, filter(None, self._ids))) or "(?!)")

    def split(self, text: str) -> list[Segment] | None:
        """Returns the segments of `text` that are not empty; None if it contains no token."""
        if not self._any.search(text):
            return None
        parts: list[str] = self._trie.split(text)
        places: list[Sequence[int]] = []
        for part in parts:
            start = places[-1][-1] + 1 if places else 0
            places.append(range(start, start + len(part)))
        for index, part in enumerate(parts):
            token = self._tokens.get(part)
            if token is None:
                continue
            left = parts[index - 1] if index else ""
            right = parts[index + 1] if index + 1 < len(parts) else ""
            if token.rstrip and right:
                parts[index + 1] = right.lstrip()
                places[index + 1] = places[index + 1][len(right) - len(parts[index + 1]) :]
            if token.lstrip and left:
                parts[index - 1] = left.rstrip()
                places[index - 1] = places[index - 1][: len(parts[index - 1])]
            if token.single_word and left and left[-1] != " ":
                parts[index - 1] += part
                places[index - 1] = [*places[index - 1], *places[index]]
                parts[index] = ""
            elif token.single_word and right and right[0] != " ":
                parts[index + 1] = part + parts[index + 1]
                places[index + 1] = [*places[index], *places[index + 1]]
                parts[index] = ""
        segments = zip(parts, places, strict=True)
        return [Segment(part, place, self._ids.get(part)) for part, place in segments if part]

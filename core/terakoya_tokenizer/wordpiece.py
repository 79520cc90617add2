"""Splitting a word into WordPiece's pieces, by BERT's greedy longest match (https://arxiv.org/abs/1609.08144, section
4.1), and where they are in the word."""

from __future__ import annotations

import re
from collections.abc import Mapping

PREFIX = "##"
MAX_CHARACTERS = 100
"""Longer words become the unknown token (Transformers' `WordpieceTokenizer`)."""

Pieces = tuple[list[int], list[int], list[int]]
"""Of the pieces of a word: their ids, the positions of their first characters in the word, and those after their last
characters."""

_PART, _SPACE = re.compile(r"\S+"), re.compile(r"\s")


class WordPiece:
    """Splits words into the ids of their pieces."""

    def __init__(self, vocabulary: Mapping[str, int], unknown: int) -> None:
        """`unknown` is the id of a word that cannot be split into pieces of `vocabulary`."""
        self._unknown = unknown
        self._first = dict(vocabulary)
        self._next = {piece[len(PREFIX) :]: id for piece, id in vocabulary.items() if piece.startswith(PREFIX)}
        self._longest = max(map(len, vocabulary), default=0)

    def ids(self, word: str) -> list[int]:
        """Returns the ids of a word's pieces. White space separates several words; a word of white space has no ids."""
        return self.pieces(word)[0]

    def pieces(self, word: str) -> Pieces:
        """Returns the pieces of a word, as `ids` does. An unknown word is one piece."""
        ids: list[int] = []
        if word and not _SPACE.search(word):
            ids, stops = self._part(word)
            return ids, [0, *stops[:-1]], stops
        starts: list[int] = []
        stops = []
        for part in _PART.finditer(word):
            begin, end = part.span()
            found, ends = self._part(part.group())
            ids += found
            starts += [begin, *(begin + each for each in ends[:-1])]
            stops += [begin + each for each in ends]
            assert stops[-1] == end
        return ids, starts, stops

    def _part(self, word: str) -> tuple[list[int], list[int]]:
        """Returns the ids of the pieces of a word without white space, and the position after each."""
        length = len(word)
        if length > MAX_CHARACTERS:
            return [self._unknown], [length]
        if (whole := self._first.get(word)) is not None:
            return [whole], [length]
        ids: list[int] = []
        stops: list[int] = []
        start, last, pieces = 0, length - 1, self._first
        while start < length:
            for stop in range(min(last, start + self._longest), start, -1):
                id = pieces.get(word[start:stop])
                if id is not None:
                    ids.append(id)
                    stops.append(stop)
                    start, last, pieces = stop, length, self._next
                    break
            else:
                return [self._unknown], [length]
        return ids, stops

"""Splitting a word into characters, as Transformers' `CharacterTokenizer` does, and lower-casing it before."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Mapping

from terakoya_tokenizer.normalization import nfkc_spans
from terakoya_tokenizer.wordpiece import Pieces


class Characters:
    """Splits words into the ids of their characters."""

    def __init__(self, vocabulary: Mapping[str, int], unknown: int) -> None:
        """`unknown` is the id of a character that is not in `vocabulary`."""
        self._vocabulary, self._unknown = vocabulary, unknown

    def pieces(self, word: str) -> Pieces:
        """Returns the normalised (NFKC) characters of a word, white space included."""
        normal = unicodedata.normalize("NFKC", word)
        ids = [self._vocabulary.get(character, self._unknown) for character in normal]
        spans = nfkc_spans(word)
        if spans is None:
            return ids, list(range(len(ids))), list(range(1, len(ids) + 1))
        return ids, *spans


def lower_cased(pieces: Callable[[str], Pieces], never_split: Collection[str]) -> Callable[[str], Pieces]:
    """Returns the function `pieces` for words that are lower-cased first, apart from those in `never_split`; positions
    are those in the word as it was."""

    def lower(word: str) -> Pieces:
        if word in never_split:
            return pieces(word)
        small = word.lower()
        ids, starts, stops = pieces(small)
        if len(small) == len(word):
            return ids, starts, stops
        places = [place for place, character in enumerate(word) for _ in character.lower()]
        return ids, [places[start] for start in starts], [places[stop - 1] + 1 for stop in stops]

    return lower

"""Where MeCab's words begin in a text, white space kept: for training between words and for whole-word masking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from terakoya.data import mecab


class WordBounds:
    """Finds where words begin. Holds MeCab's state: belongs to one process."""

    def __init__(self, options: str, *, space_behind: bool = False, whole: Iterable[str] = ()) -> None:
        """`options` are MeCab's. White space between words belongs to the next word, with `space_behind` to the one
        before. No word begins inside one of the strings `whole`."""
        self._words = mecab.MecabWords(options, normalize=False)
        self._space_behind = space_behind
        symbols = sorted(filter(None, whole), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, symbols)) or "(?!)")

    def starts(self, texts: Sequence[str]) -> list[list[int]]:
        """For each text, ascending, the positions where a word begins; 0 is one of them unless the text is empty."""
        clean = [text.replace("\0", " ").replace("\n", " ") for text in texts]  # what MeCab takes for an end
        return [self._starts(text, words) for text, words in zip(clean, self._words.split(clean), strict=True)]

    def _starts(self, text: str, words: str) -> list[int]:
        if not text:
            return []
        found = [0]
        end = 0
        for word in words.split(" "):
            start = text.find(word, end) if word else -1
            if start < 0:
                continue
            found.append(start if self._space_behind else end)
            end = start + len(word)
        starts = sorted(set(found))
        for symbol in self._whole.finditer(text):
            starts = [start for start in starts if not symbol.start() < start < symbol.end()]
        return starts

    def joined(self, text: str, delimiter: str) -> str:
        """`text` with `delimiter` between its words."""
        starts = self.starts([text])[0]
        return delimiter.join(text[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True))


def flags(starts: Sequence[Sequence[int]], lengths: Sequence[np.ndarray]) -> np.ndarray:
    """True for each piece that begins where a word begins, or is the first of its text: (T,) bool over all texts.

    `lengths` are the characters of each text's pieces. A piece that reaches over a word's beginning joins both words,
    so what lies from one True to the next is always whole words.
    """
    parts = []
    for word_starts, piece_lengths in zip(starts, lengths, strict=True):
        begins = np.cumsum(piece_lengths) - piece_lengths
        part = np.isin(begins, np.fromiter(word_starts, np.int64, len(word_starts))) & (piece_lengths > 0)
        part[:1] = True
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, bool)

"""Finds the starts of MeCab's words in a text with its white space, for training and for whole-word masking.

MeCab's word boundaries limit what is learnt, not how a text is tokenized. Every learnt piece is inside some word; but
Transformers loads a model that sees only the text, and a piece learnt from one word may also span two other words: って
is a word in って言う and spans 習っ|て. Keeping these two words apart would give other ids than the saved folder, so
they count as one word and masking still masks whole words. This concerns 2 to 5 boundaries in a hundred, more with a
larger vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from terakoya.toolkit.tokenizers import mecab


class WordBounds:
    """Finds word starts. Holds MeCab's state, so it belongs to one process."""

    def __init__(self, options: str, *, space_is_suffix: bool = False, symbols: Iterable[str] = ()) -> None:
        """`options` are MeCab's. White space between words belongs to the next word, with `space_is_suffix` to the
        previous one. No word starts inside one of the strings `symbols`."""
        self._words = mecab.build_splitter(options, normalize=False)
        self._space_is_suffix = space_is_suffix
        symbols = sorted(filter(None, symbols), key=len, reverse=True)
        self._symbols = re.compile("|".join(map(re.escape, symbols)) or "(?!)")

    def starts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the positions of the word starts of each text, ascending, with 0 unless the text is empty."""
        clean = [text.replace("\0", " ").replace("\n", " ") for text in texts]  # characters at which MeCab stops
        return [self._starts(text, words) for text, words in zip(clean, self._words.split(clean), strict=True)]

    def _starts(self, text: str, words: str) -> list[int]:
        if not text:
            return []
        parts = words.split(" ")
        space = text.startswith(" ")
        ends = list(itertools.accumulate(map(len, parts), initial=int(space)))
        if ends[-1] == len(text) and " " not in text[space:]:  # most texts: words without anything between them
            starts = [0, *ends[1:-1]] if not (space and self._space_is_suffix) else [0, *ends[:-1]]
        else:
            starts = self._search_starts(text, parts)
        if not self._symbols.search(text):
            return starts
        inside = {at for match in self._symbols.finditer(text) for at in range(match.start() + 1, match.end())}
        return [start for start in starts if start not in inside]

    def _search_starts(self, text: str, words: Sequence[str]) -> list[int]:
        """Returns the word starts of a text that has white space between words."""
        starts = [0]
        end = 0
        for word in words:
            start = text.find(word, end) if word else -1
            if start < 0:
                continue
            starts.append(start if self._space_is_suffix else end)
            end = start + len(word)
        return sorted(set(starts))

    def insert_delimiters(self, text: str, delimiter: str) -> str:
        """Returns `text` with `delimiter` between its words."""
        starts = self.starts([text])[0]
        return delimiter.join(text[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True))


def word_start_flags(
    starts: Sequence[Sequence[int]], characters: Sequence[int], pieces: Sequence[int], lengths: np.ndarray
) -> np.ndarray:
    """Returns True for each piece that starts a word or its text: (T,) bool over all texts.

    `characters` and `pieces` are the numbers of each text, `lengths` (T,) the number of characters of each piece. A
    piece that spans two words joins them, so the pieces from one True to the next are always whole words.
    """
    text_starts = np.cumsum([0, *characters])
    first = np.cumsum([0, *pieces])
    piece_starts = np.cumsum(lengths) - lengths
    assert np.array_equal(np.append(piece_starts, lengths.sum())[first], text_starts), (
        "the pieces do not add up to the texts"
    )
    is_word_start = np.zeros(text_starts[-1] + 1, bool)
    counts = np.fromiter(map(len, starts), np.int64, len(starts))
    positions = np.fromiter(itertools.chain.from_iterable(starts), np.int64, int(counts.sum()))
    is_word_start[positions + np.repeat(text_starts[:-1], counts)] = True
    result = is_word_start[piece_starts] & (lengths > 0)
    result[first[:-1][np.diff(first) > 0]] = True
    return result

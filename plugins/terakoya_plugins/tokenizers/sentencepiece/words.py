"""Where MeCab's words begin in a text, white space kept: for training between words and for whole-word masking.

MeCab's borders decide what is learnt, not how a text is cut. No piece is learnt that is not inside some word; but
Transformers loads a model that knows the text alone, and a piece learnt from one word fits over two others as well:
って is a word in って言う and fits over 習っ|て. Keeping those apart would give other ids than the saved folder. They
count as one word instead, so that masking still takes whole words: 2 to 5 borders in a hundred, the more the larger
the vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from terakoya.toolkit.tokenizers import mecab


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
        parts = words.split(" ")
        space = text.startswith(" ")
        ends = list(itertools.accumulate(map(len, parts), initial=int(space)))
        if ends[-1] == len(text) and " " not in text[space:]:  # what most texts are: words, and nothing between them
            found = [0, *ends[1:-1]] if not (space and self._space_behind) else [0, *ends[:-1]]
        else:
            found = self._searched(text, parts)
        if not self._whole.search(text):
            return found
        inside = {place for each in self._whole.finditer(text) for place in range(each.start() + 1, each.end())}
        return [start for start in found if start not in inside]

    def _searched(self, text: str, words: Sequence[str]) -> list[int]:
        """As `starts`, with white space between words."""
        found = [0]
        end = 0
        for word in words:
            start = text.find(word, end) if word else -1
            if start < 0:
                continue
            found.append(start if self._space_behind else end)
            end = start + len(word)
        return sorted(set(found))

    def joined(self, text: str, delimiter: str) -> str:
        """`text` with `delimiter` between its words."""
        starts = self.starts([text])[0]
        return delimiter.join(text[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True))


def flags(
    starts: Sequence[Sequence[int]], characters: Sequence[int], pieces: Sequence[int], lengths: np.ndarray
) -> np.ndarray:
    """True for each piece that begins where a word begins, or is the first of its text: (T,) bool over all texts.

    `characters` and `pieces` are how many each text has, `lengths` (T,) the characters of each piece. A piece that
    reaches over a word's beginning joins both words, so what lies from one True to the next is always whole words.
    """
    text_begins = np.cumsum([0, *characters])
    first = np.cumsum([0, *pieces])
    begins = np.cumsum(lengths) - lengths
    assert np.array_equal(np.append(begins, lengths.sum())[first], text_begins), "pieces are not what texts consist of"
    mark = np.zeros(text_begins[-1] + 1, bool)
    counts = np.fromiter(map(len, starts), np.int64, len(starts))
    places = np.fromiter(itertools.chain.from_iterable(starts), np.int64, int(counts.sum()))
    mark[places + np.repeat(text_begins[:-1], counts)] = True
    result = mark[begins] & (lengths > 0)
    result[first[:-1][np.diff(first) > 0]] = True
    return result

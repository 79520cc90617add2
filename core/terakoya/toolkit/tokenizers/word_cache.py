"""A cache from words to ids: finding a word is a hash lookup, everything else is numpy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

LINE_END = "\n"
"""The entry among the words at the end of a line."""


class WordCache:
    """The ids of each word, computed once and stored in one flat array.

    A web corpus has an unlimited number of words: beyond `max_words` entries the cache is cleared.
    """

    def __init__(
        self, word_ids: Callable[[str], Sequence[int]], dtype: np.dtype, *, max_words: int = 1_000_000
    ) -> None:
        self._word_ids, self._dtype, self._max_words = word_ids, dtype, max_words
        self._clear()

    def __len__(self) -> int:
        return len(self._rows)

    def encode(self, words: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids (T,) of `words` in order, word starts (T,) bool, and the number of tokens (L,) int64 of each
        line, including empty lines. A line ends at each `LINE_END`."""
        if len(self._rows) > self._max_words:
            self._clear()
        rows = np.fromiter(map(self._rows.__getitem__, words), np.int32, len(words))
        lengths = np.frombuffer(self._lengths, np.int32)[rows]
        stops = np.cumsum(lengths, dtype=np.int64)
        total = int(stops[-1]) if len(stops) else 0
        starts = stops - lengths
        places = np.arange(total) + np.repeat(np.frombuffer(self._offsets, np.int64)[rows] - starts, lengths)
        ids = np.frombuffer(self._ids, np.int32)[places].astype(self._dtype) if total else np.empty(0, self._dtype)
        word_starts = np.zeros(total, dtype=bool)
        word_starts[starts[lengths > 0]] = True
        return ids, word_starts, np.diff(stops[rows == 0], prepend=0)

    def _clear(self) -> None:
        self._lengths, self._offsets, self._ids = array("i"), array("q"), array("i")
        self._rows = _Rows(self._add)
        self._add(LINE_END, [])

    def _add(self, word: str, ids: Sequence[int] | None = None) -> int:
        """Adds a word and returns its row."""
        ids = self._word_ids(word) if ids is None else ids
        row = len(self._lengths)
        self._lengths.append(len(ids))
        self._offsets.append(len(self._ids))
        self._ids.extend(ids)
        self._rows[word] = row
        return row


class _Rows(dict[str, int]):
    def __init__(self, add: Callable[[str], int]) -> None:
        self._add = add

    def __missing__(self, word: str) -> int:
        return self._add(word)

"""A cache from words to pieces: finding a word is a hash lookup, everything else is numpy."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable

import numpy as np

from terakoya_tokenizer.wordpiece import Pieces

MARK = "\ud800"
"""The first character of an entry that is no word. It cannot be part of a text that MeCab reads."""
LINE_END = f"{MARK}\n"
"""The entry among the words at the end of a line."""


def span(start: int, stop: int) -> int:
    """Returns the place of the characters from `start` to the one before `stop` as one number, for arrays of them.
    Adding `span(n, n)` moves it by n."""
    return start << 32 | stop


class WordCache:
    """The pieces of each word, computed once and stored in flat arrays.

    A web corpus has an unlimited number of words: beyond `max_words` entries the cache is cleared.
    """

    def __init__(
        self, pieces: Callable[[str], Pieces], dtype: np.dtype, *, slots: int = 0, max_words: int = 1_000_000
    ) -> None:
        """`pieces` splits a word; a `LINE_END` has `slots` tokens, which the caller fills."""
        self._pieces, self._dtype, self._slots, self._max_words = pieces, dtype, slots, max_words
        self._clear()

    def __len__(self) -> int:
        return len(self._rows)

    def encode(self, words: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids (T,) of `words` in order, word starts (T,) bool, and the number of tokens (L,) int64 of each
        line, including empty lines. A line ends at each `LINE_END`."""
        found = self.find(words)
        ids = found.ids()
        word_starts = np.zeros(len(ids), dtype=bool)
        word_starts[found.first_tokens[:-1][found.lengths > 0]] = True
        return ids.astype(self._dtype), word_starts, np.diff(found.first_tokens[found.line_ends], prepend=0)

    def find(self, words: list[str]) -> FoundWords:
        """Returns where `words` are in the cache; those that are new are added."""
        if len(self._rows) > self._max_words:
            self._clear()
        return FoundWords(self._table, np.fromiter(map(self._rows.__getitem__, words), np.intp, len(words)))

    def _clear(self) -> None:
        self._table = _Table()
        self._rows = _Rows(self._add)
        self._rows[LINE_END] = self._table.add(([0] * self._slots,) * 3, characters=0)

    def _add(self, word: str) -> int:
        """Adds a word and returns its row."""
        row = self._rows[word] = self._table.add(self._pieces(word), characters=len(word))
        return row


class FoundWords:
    """The rows of words in the cache. Their tokens are looked up when they are asked for, also after the cache has been
    cleared; not while another thread adds words.

    Attributes:
        lengths: the number of tokens of each word (W,).
        first_tokens: the number of tokens before each word, and that of all (W + 1,).
        line_ends: the words that are a `LINE_END` (L,).
    """

    def __init__(self, table: _Table, rows: np.ndarray) -> None:
        self._table, self._rows = table, rows
        self.lengths = np.frombuffer(table.lengths, np.int32)[rows]
        self.first_tokens = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.line_ends = np.flatnonzero(rows == 0)

    def ids(self) -> np.ndarray:
        """Returns the ids of the tokens (T,)."""
        return self._values(self._table.ids)

    def spans(self) -> np.ndarray:
        """Returns the `span` of each token in its word (T,)."""
        return self._values(self._table.spans)

    def characters(self) -> np.ndarray:
        """Returns the number of characters of each word (W,), 0 for a line end."""
        return np.frombuffer(self._table.characters, np.int32)[self._rows]

    def _values(self, flat: array[int]) -> np.ndarray:
        values = np.frombuffer(flat, flat.typecode) if flat else np.empty(0, flat.typecode)
        return values[self._places]

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """The place of each token in the flat arrays (T,)."""
        offsets = np.frombuffer(self._table.offsets, np.int64)[self._rows]
        places: np.ndarray = np.repeat(offsets - self.first_tokens[:-1], self.lengths)
        places += np.arange(len(places))
        return places


class _Table:
    """Flat arrays of words and of their tokens."""

    def __init__(self) -> None:
        self.lengths, self.characters, self.offsets = array("i"), array("i"), array("q")
        self.ids, self.spans = array("i"), array("q")

    def add(self, pieces: Pieces, *, characters: int) -> int:
        """Adds a word and returns its row."""
        ids, starts, stops = pieces
        self.lengths.append(len(ids))
        self.characters.append(characters)
        self.offsets.append(len(self.ids))
        self.ids.extend(ids)
        self.spans.extend(map(span, starts, stops))
        return len(self.lengths) - 1


class _Rows(dict[str, int]):
    def __init__(self, add: Callable[[str], int]) -> None:
        self._add = add

    def __missing__(self, word: str) -> int:
        return self._add(word)

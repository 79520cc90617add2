"""Texts to ids, and to the part of the text that each token stands for.

Ids are looked up at once. What else a caller may ask for is computed when it does: spans take as long as ids.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from terakoya_tokenizer.added_tokens import AddedTokens
from terakoya_tokenizer.mecab import MecabSplitter
from terakoya_tokenizer.normalization import are_moved
from terakoya_tokenizer.texts import PlainText, SegmentedText
from terakoya_tokenizer.word_cache import LINE_END, MARK, FoundTokens, WordCache
from terakoya_tokenizer.wordpiece import Pieces


class _Pairs:
    """Pairs of a start and a stop, each made once: a new pair for each token would set off Python's garbage collection,
    which takes longer than all the rest of encoding."""

    LONGEST = 16
    """Tokens of so many characters or more have pairs of their own."""
    LAST = 1 << 14
    """Texts with tokens from here on have pairs of their own."""

    def __init__(self) -> None:
        self._table = np.empty((self.LONGEST, 0), object)  # by length and start

    def of(self, starts: np.ndarray, stops: np.ndarray) -> list[tuple[int, int]]:
        """Returns the pair of each of `starts` and `stops`."""
        end = int(starts.max(initial=0)) + 1
        if end > self.LAST:
            return list(zip(starts.tolist(), stops.tolist(), strict=True))
        table = self._table if end <= self._table.shape[1] else self._grow(end)
        lengths = stops - starts
        pairs: list[tuple[int, int]] = table[np.minimum(lengths, self.LONGEST - 1), starts].tolist()
        for place in np.flatnonzero(lengths >= self.LONGEST).tolist():
            pairs[place] = (int(starts[place]), int(stops[place]))
        return pairs

    def _grow(self, end: int) -> np.ndarray:
        """Returns a table of the starts before `end` and some more."""
        old, size = self._table, 1 << max(9, (end - 1).bit_length())
        table = np.empty((self.LONGEST, size), object)
        table[:, : old.shape[1]] = old
        for length, row in enumerate(table[:, old.shape[1] :]):
            starts = range(old.shape[1], size)
            row[:] = np.fromiter(((start, start + length) for start in starts), object, len(starts))
        self._table = table
        return table


_PAIRS = _Pairs()


class EncodedTexts:
    """The tokens of several texts.

    Lists of all tokens have one place more before and after each text, for tokens around it.

    Attributes:
        ids: the id of each token.
        firsts: the place of each text's first token (N).
        lasts: the place after each text's last token (N).
    """

    def __init__(
        self,
        texts: Sequence[str],
        normals: Sequence[str],
        words: Sequence[str],
        segmented: Mapping[int, SegmentedText],
        found: FoundTokens,
        around: tuple[int, int],
    ) -> None:
        """Of each of `texts`, `normals` is what MeCab reads and `words` what it returns; `segmented` are those with
        added tokens in them, by their numbers. `around` are the ids around each text. Of the tokens that were `found`
        two stand before, between and after all texts."""
        self._texts, self._normals, self._words, self._segmented = texts, normals, words, segmented
        self._found = found
        self._after = found.line_ends[::2]  # the last one of the text before, if there is one
        found.ids[self._after + 1], found.ids[self._after] = around
        self.ids: list[int] = found.ids.tolist()
        self.firsts: list[int] = (self._after[:-1] + 2).tolist()
        self.lasts: list[int] = self._after[1:].tolist()

    @functools.cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and stop of each token in its text, (0, 0) for those around it."""
        starts, stops = self._found.spans()
        first, last = self._origins(starts[self._after])
        starts, stops = first[starts], last[stops - 1]
        for places in (self._after, self._after + 1):
            starts[places] = stops[places] = 0
        return _PAIRS.of(starts, stops)

    @functools.cached_property
    def words(self) -> list[int]:
        """The number of each token's word in its text."""
        numbers = self._found.word_numbers() - 1
        before = numbers[self._after] + 1
        numbers -= np.repeat(before, np.diff(self._after, append=len(numbers)))
        words: list[int] = numbers.tolist()
        return words

    def _origins(self, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each character of all texts' words the position in its text of the first character that it comes
        from, and the position after the last one. `ends` (N + 1) are the numbers of those before the first text and up
        to the end of each."""
        sizes = np.fromiter(map(len, self._normals), np.int64, len(self._normals))
        begins = np.cumsum(sizes) - sizes
        codes = np.frombuffer("".join(self._normals).encode("utf-32-le"), np.uint32)
        read = np.flatnonzero(codes != ord(" "))  # MeCab leaves spaces out
        counts = np.diff(np.searchsorted(read, begins), append=len(read))
        first = read - np.repeat(begins, counts)
        irregular = counts != np.diff(ends)
        irregular[[*self._segmented, *(number for number, words in enumerate(self._words) if "\0" in words)]] = True
        if irregular.any():
            regular, first = first[~np.repeat(irregular, counts)], np.empty(ends[-1], np.int64)
            first[~np.repeat(irregular, np.diff(ends))] = regular
            for number in np.flatnonzero(irregular).tolist():
                first[ends[number] : ends[number + 1]] = self._text(number).character_positions()
        first = np.append(first, 0)
        last = first + 1
        changed = [number for number, text in enumerate(self._texts) if self._normals[number] is not text]
        moved = itertools.compress(changed, are_moved([self._texts[number] for number in changed]).tolist())
        for number in {*moved, *self._segmented}:
            if (origins := self._text(number).origins()) is not None:
                characters = slice(ends[number], ends[number + 1])
                last[characters] = origins[1][first[characters]]
                first[characters] = origins[0][first[characters]]
        return first, last

    def _text(self, number: int) -> PlainText | SegmentedText:
        segmented = self._segmented.get(number)
        return segmented or PlainText(self._texts[number], self._normals[number], self._words[number])


class SpanEncoder:
    """Encodes texts. It holds MeCab's state and belongs to one process; threads take turns."""

    def __init__(self, splitter: MecabSplitter, pieces: Callable[[str], Pieces], added: AddedTokens) -> None:
        """`pieces` splits a word."""
        self._splitter, self._pieces, self._added = splitter, pieces, added
        self._cache = WordCache(self._word_pieces, np.dtype(np.int32), slots=2)
        self._lock = threading.Lock()

    def encode(
        self, texts: Sequence[str], *, around: tuple[int, int] = (0, 0), added_tokens: bool = True
    ) -> EncodedTexts:
        """Returns the tokens of `texts`, with the ids `around` each. Without `added_tokens`, these are plain text."""
        with self._lock:
            return self._encode(texts, around, added_tokens)

    def _encode(self, texts: Sequence[str], around: tuple[int, int], added_tokens: bool) -> EncodedTexts:
        segmented = {}
        if added_tokens:
            found = zip(range(len(texts)), map(self._added.split, texts), strict=True)
            segmented = {number: SegmentedText(each, self._splitter) for number, each in found if each is not None}
        normals = [self._splitter.normalize(text.partition("\0")[0] if "\0" in text else text) for text in texts]
        for number in segmented:
            normals[number] = ""
        words = self._splitter.split(normals)
        for number, text in segmented.items():
            normals[number], words[number] = text.normal, text.words
        lines = f" {LINE_END} ".join(["", *words, ""])[1:]
        return EncodedTexts(texts, normals, words, segmented, self._cache.find(lines), around)

    def _word_pieces(self, word: str) -> Pieces:
        if word.startswith(MARK):
            id = int(word[len(MARK) :])
            return [id], [0], [len(self._added.contents[id])]
        return self._pieces(word)

"""Texts to ids, and to the part of the text that each token stands for.

Ids are looked up at once. What else a caller may ask for is computed when it does: spans take as long as ids.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from terakoya_tokenizer.added_tokens import AddedTokens
from terakoya_tokenizer.mecab import MecabSplitter
from terakoya_tokenizer.texts import PlainText, SegmentedText
from terakoya_tokenizer.word_cache import LINE_END, MARK, FoundWords, WordCache, span
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

    def of(self, spans: np.ndarray) -> list[tuple[int, int]]:
        """Returns the pair of each `span`."""
        starts = spans >> 32
        stops = spans & 0xFFFFFFFF
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
        found: FoundWords,
        around: tuple[int, int],
        lock: threading.Lock,
    ) -> None:
        """Of each of `texts`, `normals` is what MeCab reads and `words` what it returns; `segmented` are those with
        added tokens in them, by their numbers. `around` are the ids around each text. Who holds `lock` reads the words
        that were `found`, among which are line ends of two tokens before, between and after all texts."""
        self._texts, self._normals, self._words, self._segmented = texts, normals, words, segmented
        self._found, self._lock = found, lock
        self._after = found.first_tokens[found.line_ends]  # the last one of the text before, if there is one
        ids = found.ids()
        ids[self._after + 1], ids[self._after] = around
        self.ids: list[int] = ids.tolist()
        self.firsts: list[int] = (self._after[:-1] + 2).tolist()
        self.lasts: list[int] = self._after[1:].tolist()

    @functools.cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and stop of each token in its text, (0, 0) for those around it."""
        return _PAIRS.of(self._spans())

    @functools.cached_property
    def words(self) -> list[int]:
        """The number of each token's word in its text."""
        first_words = self._found.line_ends[:-1] + 1
        in_text = np.arange(len(self._found.lengths))
        in_text[1:] -= np.repeat(first_words, np.diff(self._found.line_ends))
        numbers: list[int] = np.repeat(in_text, self._found.lengths).tolist()
        return numbers

    def _spans(self) -> np.ndarray:
        """Returns the `span` of each token in its text, 0 for those around it."""
        with self._lock:
            spans, characters = self._found.spans(), self._found.characters()
        ends = self._found.line_ends
        first_words = ends[:-1] + 1
        begins = np.cumsum(characters) - characters
        sizes = begins[ends[1:]] - begins[first_words]
        begins[1:] -= np.repeat(begins[first_words], np.diff(ends))
        spaced = sizes != np.fromiter(map(len, self._normals), np.int64, len(sizes))  # MeCab leaves spaces out
        for number in np.flatnonzero(spaced).tolist():
            begins[first_words[number] : ends[number + 1]] = self._text(number).word_positions()
        spans += np.repeat(begins * span(1, 1), self._found.lengths)
        for number, (text, normal) in enumerate(zip(self._texts, self._normals, strict=True)):
            if normal is not text and (origins := self._text(number).origins()) is not None:
                tokens = slice(self.firsts[number], self.lasts[number])
                starts, stops = origins
                spans[tokens] = starts[spans[tokens] >> 32] << 32 | stops[(spans[tokens] & 0xFFFFFFFF) - 1]
        spans[self._after] = spans[self._after + 1] = 0
        return spans

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
        lines = f" {LINE_END} ".join(["", *words, ""]).strip(" ")
        found_words = self._cache.find(lines.split(" "))
        return EncodedTexts(texts, normals, words, segmented, found_words, around, self._lock)

    def _word_pieces(self, word: str) -> Pieces:
        if word.startswith(MARK):
            id = int(word[len(MARK) :])
            return [id], [0], [len(self._added.contents[id])]
        return self._pieces(word)

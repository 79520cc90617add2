"""Texts to ids, and to the part of the text that each token stands for.

Ids are looked up at once. What else a caller may ask for is computed when it does: spans take as long as ids.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from terakoya_tokenizer.added_tokens import AddedTokens
from terakoya_tokenizer.mecab import MecabSplitter
from terakoya_tokenizer.texts import PlainText, SegmentedText
from terakoya_tokenizer.word_cache import LINE_END, MARK, FoundWords, WordCache
from terakoya_tokenizer.wordpiece import Pieces


class _Pairs(dict[int, tuple[int, int]]):
    """Pairs of numbers by the first times 2**32 plus the second. Most are asked for again. A new pair for each token
    would set off Python's garbage collection, which takes longer than all the rest of encoding."""

    def __missing__(self, key: int) -> tuple[int, int]:
        if len(self) >= 1 << 17:
            self.clear()
        self[key] = pair = (key >> 32, key & 0xFFFFFFFF)
        return pair


_PAIRS = _Pairs()


@dataclass(frozen=True)
class Spans:
    """What the tokens of several texts stand for, one text after the other.

    Attributes:
        starts: the position of each token's first character in its text (T,).
        stops: the position after its last character (T,).
        words: the number of its word in its text (T,).
    """

    starts: np.ndarray
    stops: np.ndarray
    words: np.ndarray


class EncodedTexts:
    """The tokens of several texts, one text after the other.

    Attributes:
        ids: of the tokens (T).
        bounds: the first token of each text, and the number of all tokens (N + 1).
    """

    def __init__(
        self,
        texts: Sequence[str],
        normals: Sequence[str],
        words: Sequence[str],
        segmented: Mapping[int, SegmentedText],
        found: FoundWords,
        lock: threading.Lock,
    ) -> None:
        """Of each of `texts`, `normals` is what MeCab reads and `words` what it returns; `segmented` are those with
        added tokens in them, by their numbers. Who holds `lock` reads the words that were `found`."""
        self._texts, self._normals, self._words, self._segmented = texts, normals, words, segmented
        self._found, self._lock = found, lock
        self.ids: list[int] = found.ids().tolist()
        self.bounds: list[int] = [0, *found.first_tokens[found.line_ends].tolist()]

    @functools.cached_property
    def spans(self) -> Spans:
        """What the tokens stand for."""
        with self._lock:
            starts, stops = self._found.spans()
            characters = self._found.characters()
        lengths, ends = self._found.lengths, self._found.line_ends
        first_words = np.concatenate([[0], ends + 1])
        sizes = np.diff(first_words)  # the words of each text, and its line end
        totals = np.concatenate([[0], np.cumsum(characters, dtype=np.int64)])
        begins = totals[:-1] - np.repeat(totals[first_words[:-1]], sizes)
        spaced = np.diff(totals[first_words]) != list(map(len, self._normals))  # MeCab leaves spaces out
        for number in np.flatnonzero(spaced).tolist():
            begins[first_words[number] : ends[number]] = self._text(number).word_positions()
        at = np.repeat(begins, lengths)
        starts, stops = at + starts, at + stops
        for number, (text, normal) in enumerate(zip(self._texts, self._normals, strict=True)):
            if normal is not text:
                tokens = slice(self.bounds[number], self.bounds[number + 1])
                from_starts, from_stops = self._text(number).origins()
                starts[tokens], stops[tokens] = from_starts[starts[tokens]], from_stops[stops[tokens] - 1]
        words = np.repeat(np.arange(len(lengths)) - np.repeat(first_words[:-1], sizes), lengths)
        return Spans(starts, stops, words)

    @functools.cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and stop of each token."""
        keys = self.spans.starts << 32 | self.spans.stops
        return list(map(_PAIRS.__getitem__, keys.tolist()))

    def _text(self, number: int) -> PlainText | SegmentedText:
        segmented = self._segmented.get(number)
        return segmented or PlainText(self._texts[number], self._normals[number], self._words[number])


class SpanEncoder:
    """Encodes texts. It holds MeCab's state and belongs to one process; threads take turns."""

    def __init__(self, splitter: MecabSplitter, pieces: Callable[[str], Pieces], added: AddedTokens) -> None:
        """`pieces` splits a word."""
        self._splitter, self._pieces, self._added = splitter, pieces, added
        self._cache = WordCache(self._word_pieces, np.dtype(np.int32))
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], *, added_tokens: bool = True) -> EncodedTexts:
        """Returns the tokens of `texts`; without `added_tokens`, these are ordinary text."""
        with self._lock:
            return self._encode(texts, added_tokens)

    def _encode(self, texts: Sequence[str], added_tokens: bool) -> EncodedTexts:
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
        lines = f" {LINE_END} ".join([*words, ""]).rstrip(" ")
        return EncodedTexts(texts, normals, words, segmented, self._cache.find(lines.split(" ")), self._lock)

    def _word_pieces(self, word: str) -> Pieces:
        if word.startswith(MARK):
            id = int(word[len(MARK) :])
            return [id], [0], [len(self._added.contents[id])]
        return self._pieces(word)

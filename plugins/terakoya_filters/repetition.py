"""The step `repetition`: Gopher's rules against repeated text.

Rae et al. 2021, Scaling Language Models: Methods, Analysis & Insights from Training Gopher, table A1
(https://arxiv.org/abs/2112.11446), whose numbers are the defaults. Words are those of `words.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from terakoya.components import CleaningStep
from terakoya_filters.words import Words, codes_of, find_words

_TOP_TIMES = 3
"""How often an n-gram comes at least that is the most frequent one: in a few sentences one has to be."""

_FACTOR = np.uint64(0xD6E8FEB86659FD93)


class Repetition(CleaningStep):
    """Drops documents that repeat lines, paragraphs or words (Gopher's rules, table A1)."""

    max_duplicate_lines: float = Field(default=0.30, ge=0, le=1)
    """The largest share of lines that an earlier line equals, from 0 to 1."""
    max_duplicate_line_characters: float = Field(default=0.20, ge=0, le=1)
    """The largest share of the characters in such lines, from 0 to 1."""
    max_duplicate_paragraphs: float = Field(default=0.30, ge=0, le=1)
    """The largest share of paragraphs, which empty lines separate, that an earlier one equals, from 0 to 1."""
    max_duplicate_paragraph_characters: float = Field(default=0.20, ge=0, le=1)
    """The largest share of the characters in such paragraphs, from 0 to 1."""
    max_top_ngram: tuple[tuple[int, float], ...] = ((2, 0.20), (3, 0.18), (4, 0.16))
    """Numbers of words, each with the largest share of the characters, from 0 to 1, in the most frequent n-gram of so
    many."""
    max_duplicate_ngrams: tuple[tuple[int, float], ...] = (
        (5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10),
    )  # fmt: skip
    """Numbers of words, each with the largest share of the characters, from 0 to 1, in n-grams that come a second
    time."""
    max_duplicate_characters: float = Field(default=0.50, ge=0, le=1)
    """The largest share of places, from 0 to 1, whose next ten characters came before: a rule of ours, for text in
    which the words do not show."""

    def keeps(self, text: str) -> bool:
        return not self.why(text)

    def why(self, text: str) -> str:
        text = text.strip()
        if not text:
            return ""
        units = (
            ("paragraph", r"\n{2,}", self.max_duplicate_paragraphs, self.max_duplicate_paragraph_characters),
            ("line", r"\n+", self.max_duplicate_lines, self.max_duplicate_line_characters),
        )
        for unit, separator, max_share, max_characters in units:
            parts = re.split(separator, text)
            repeated, characters = _count_repeated(parts)
            if repeated > max_share * len(parts):
                return f"duplicate {unit}s"
            if characters > max_characters * len(text):
                return f"duplicate {unit} characters"
        words = find_words(text)
        for size, share in self.max_top_ngram:
            if _top_characters(words, size, share * len(text)) > share * len(text):
                return f"top {size}-gram"
        for size, share in self.max_duplicate_ngrams:
            if _duplicate_characters(words, size, share * len(text)) > share * len(text):
                return f"duplicate {size}-grams"
        tens = _ngrams(codes_of(text).astype("u8"), 10)
        if _count_again(tens) > self.max_duplicate_characters * len(tens):
            return "duplicate characters"
        return ""


def _count_repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Returns how many of `parts` an earlier one equals, and their characters."""
    unique = set(parts)
    return len(parts) - len(unique), sum(map(len, parts)) - sum(map(len, unique))


def _ngrams(hashes: np.ndarray, size: int) -> np.ndarray:
    """Returns a hash of each n-gram of `size` of the (W,) u8 `hashes`, (W - size + 1,) u8, or none."""
    count = len(hashes) - size + 1
    if count <= 0:
        return hashes[:0]
    result = hashes[:count].copy()
    for place in range(1, size):
        result *= _FACTOR
        result += hashes[place : place + count]
    return result


def _count_again(ngrams: np.ndarray) -> int:
    """Returns how many of the (N,) u8 `ngrams` an earlier one equals."""
    ordered = np.sort(ngrams)
    return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


def _top_characters(words: Words, size: int, limit: float) -> int:
    """Returns how many characters the most frequent n-gram, the first of these, has in all its places; 0 where none
    comes three times or that cannot be more than `limit`."""
    ngrams = _ngrams(words.hashes, size)
    ordered = np.sort(ngrams)
    if len(ordered) < _TOP_TIMES or not (ordered[_TOP_TIMES - 1 :] == ordered[: 1 - _TOP_TIMES]).any():
        return 0
    edges = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    counts = np.diff(edges)
    times = counts.max()
    spans = words.ends[size - 1 :] - words.starts[: len(ngrams)]
    if times * spans.max() <= limit:
        return 0
    start = np.flatnonzero(np.isin(ngrams, ordered[edges[:-1][counts == times]]))[0]
    return int(spans[start] * times)


def _duplicate_characters(words: Words, size: int, limit: float) -> int:
    """Returns how many characters are in words of n-grams that came before, where an n-gram begins behind the last one
    of these; or a number that is not above `limit`, if it cannot be."""
    ngrams = _ngrams(words.hashes, size)
    lengths = words.ends - words.starts
    at_most = _count_again(ngrams) * size * int(lengths.max(initial=0))
    if at_most <= limit:
        return at_most
    _, first = np.unique(ngrams, return_index=True)
    again = np.ones(len(ngrams), bool)
    again[first] = False
    covered = np.convolve(again, np.ones(size, "i8")) > 0
    at_most = int(lengths[covered].sum())
    if at_most <= limit:
        return at_most
    seen: set[int] = set()
    total, place, keys = 0, 0, ngrams.tolist()
    while place < len(keys):
        if keys[place] in seen:
            total += int(lengths[place : place + size].sum())
            place += size
        else:
            seen.add(keys[place])
            place += 1
    return total

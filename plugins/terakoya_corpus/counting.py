"""Counts in bounded memory: frequent keys, lengths, and distinct texts with a sample of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest

import numpy as np

_FINE = 5
"""Lengths are counted in bins of which 2**5 make an octave: a quantile is right to 1 in 32."""
SMALLEST = 500
_BINS = 2 ** (_FINE + 1) + 32 * 40


@dataclass
class FrequentKeys:
    """Counts of the most frequent keys. Of more than `capacity` different keys the rarer half is forgotten, so that a
    count may be too low by `error` at most (Manku and Motwani, 2002)."""

    capacity: int
    error: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, counts: Mapping[str, int]) -> None:
        """Adds `counts`."""
        self.counts.update(counts)
        if len(self.counts) > self.capacity:
            kept = self.counts.most_common(self.capacity // 2)
            self.error += max(self.counts[key] for key in self.counts.keys() - dict(kept).keys())
            self.counts = Counter(dict(kept))


def count_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns how many of `lengths`, (n,) integers, are in which bin, (bins,) int64."""
    octave = np.maximum(np.frexp(lengths.astype(np.float64))[1] - 1 - _FINE, 0)
    numbers = (lengths >> octave) + (octave << _FINE)
    return np.bincount(numbers, minlength=_BINS)


def quantile(bins: np.ndarray, share: float) -> int:
    """Returns the length below which the `share` of the lengths in `bins` lies, to 1 in 32."""
    number = int(np.searchsorted(np.cumsum(bins), share * bins.sum()))
    octave = max(0, (number >> _FINE) - 1)
    low = (number - (octave << _FINE)) << octave
    return low + ((1 << octave) >> 1)


@dataclass(frozen=True)
class Sampled:
    """A text of the sample: where it is first, and its beginning."""

    place: tuple[str, int]
    text: str


class DistinctTexts:
    """How often which text occurs, and a sample of the texts, by their hashes (Gibbons, 2001).

    Texts whose hash is below a limit are counted; where they are more than `capacity`, the limit is halved. So the
    counts are those of all texts, or of a share of them, whatever the order and however often each occurs. Of the
    texts, those below a lower limit are kept, `sample_characters` of them at most; a text counts as `SMALLEST` or more.
    """

    def __init__(self, capacity: int, sample_characters: int) -> None:
        self.limit = self.sample_limit = 1 << 64
        self._capacity, self._sample_characters = capacity, sample_characters
        self._counts: dict[int, int] = {}
        self._later: dict[int, Counter[str]] = {}
        self._sample: dict[int, Sampled] = {}
        self._held = 0

    def add(self, hashes: Iterable[tuple[int, str]], sampled: Mapping[int, Sampled]) -> None:
        """Adds texts in the order of the corpus, each by its hash and its group, and the `sampled` ones of them."""
        counts, limit = self._counts, self.limit
        for text, group in hashes:
            if text >= limit:
                continue
            if text in counts:
                counts[text] += 1
                self._later.setdefault(text, Counter())[group] += 1
            else:
                counts[text] = 1
        for text, each in sampled.items():
            if text < self.sample_limit and text not in self._sample:
                self._sample[text] = each
                self._held += max(len(each.text), SMALLEST)
        while len(counts) > self._capacity:
            self.limit >>= 1
            counts = self._counts = {text: count for text, count in counts.items() if text < self.limit}
            self._later = {text: count for text, count in self._later.items() if text < self.limit}
        while self.sample_limit > self.limit or (self._held > self._sample_characters and len(self._sample) > 1):
            self.sample_limit >>= 1
            self._sample = {text: each for text, each in self._sample.items() if text < self.sample_limit}
            self._held = sum(max(len(each.text), SMALLEST) for each in self._sample.values())

    @property
    def is_exact(self) -> bool:
        """Whether all texts are counted."""
        return self.limit == 1 << 64

    @property
    def counted(self) -> int:
        """The number of documents that are counted."""
        return sum(self._counts.values())

    def duplicates(self) -> Counter[str]:
        """Returns how many documents of which group are the same as an earlier one, of those that are counted."""
        found: Counter[str] = Counter()
        for groups in self._later.values():
            found.update(groups)
        return found

    def most_frequent(self, count: int) -> list[tuple[int, Sampled]]:
        """Returns how often the most frequent texts of the sample occur, and these."""
        often = nsmallest(count, ((-self._counts[text], text) for text in self._sample if self._counts[text] > 1))
        return [(-number, self._sample[text]) for number, text in often]

    def sample(self) -> Iterator[tuple[int, int, Sampled]]:
        """Yields hash, number of documents and text of those of the sample, in the order of the corpus."""
        for text, each in self._sample.items():
            yield text, self._counts[text], each

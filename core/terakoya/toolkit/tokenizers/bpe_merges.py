"""Byte-pair merges over a table of word counts, which train WordPiece and BPE vocabularies.

The algorithm is that of Sennrich et al. (https://arxiv.org/abs/1508.07909) as in `tokenizers`: repeatedly, the most
frequent pair of neighbours becomes a piece; among equal counts, the order of the pieces' ids decides. That library
accepts running text only. Here every symbol of every distinct word is stored once in flat arrays, and a merge is a few
array operations on the positions of its pair, however often the words occur.

Letters: N symbols of all words, W words, P positions of a pair.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence

import numpy as np

_SHIFT = 32  # a pair of piece ids as one integer, in the order of the pairs
_MASK = (1 << _SHIFT) - 1
_DEAD = -2  # a symbol that a merge has removed
_FEW = 100
"""Up to this number of positions, a loop is faster than array operations."""


logger = logging.getLogger("terakoya")


def warn_of_few_pieces(pieces: int, *, vocab_size: int, min_frequency: int) -> None:
    """Warns if training ended with fewer pieces than `vocab_size`, for want of frequent pairs."""
    if pieces < vocab_size:
        logger.warning(
            "vocabulary: %s pieces instead of %s: no other pair of pieces occurs %s times in this corpus",
            f"{pieces:,}",
            f"{vocab_size:,}",
            min_frequency,
        )


def merge_pairs(
    symbols: np.ndarray,
    lengths: np.ndarray,
    counts: np.ndarray,
    pieces: list[str],
    *,
    join: Callable[[str, str], str],
    vocab_size: int,
    min_frequency: int,
) -> list[tuple[int, int]]:
    """Appends new pieces to `pieces` (id -> piece), until there are `vocab_size` or no pair of neighbours occurs
    `min_frequency` times. Returns the merges as pairs of ids, in the order in which to apply them.

    `symbols` (N,) are the ids of all words one after the other, `lengths` (W,) the number of ids of each word, `counts`
    (W,) how often each word occurs. `join` joins two pieces. Memory: about 60 bytes a symbol.
    """
    merger = _Merger(symbols, lengths, counts)
    ids = {piece: id for id, piece in enumerate(pieces)}
    order: dict[tuple[int, int], None] = {}
    while len(pieces) < vocab_size:
        pair = merger.next_pair(max(1, min_frequency))
        if pair is None:
            break
        left, right, places = pair
        piece = join(pieces[left], pieces[right])
        merged = ids.setdefault(piece, len(pieces))
        if merged == len(pieces):
            pieces.append(piece)
        merger.merge(left, right, merged, places)
        order.pop((left, right), None)  # a repeated merge has its last position, as in `tokenizers`
        order[left, right] = None
    return list(order)


def codes_of(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the code points (N,) uint32 of all words one after the other, and the length (W,) int64 of each word."""
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    return codes, np.fromiter(map(len, words), np.int64, len(words))


_Places = np.ndarray | list[int]


class _Merger:
    """The words as one doubly linked list, and the positions of each pair of neighbours."""

    def __init__(self, symbols: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        total = len(symbols)  # also the position that means "none"
        self._none = total
        self._symbols = np.append(symbols.astype(np.int32), np.int32(-1))
        self._weights = np.append(np.repeat(counts.astype(np.int64), lengths), 0)
        self._next = np.arange(1, total + 2, dtype=np.int64)
        self._previous = np.arange(-1, total, dtype=np.int64)
        stops = np.cumsum(lengths)[lengths > 0]
        self._next[stops - 1] = total
        self._previous[np.concatenate([[0], stops[:-1]])] = total
        self._counts: dict[int, int] = {}
        # (-count, pair, serial, positions): a pair that arises in several merges has an entry for each.
        self._queue: list[tuple[int, int, int, _Places]] = []
        self._serial = 0
        # Views of the same memory: reading single elements through them is much faster.
        self._views = self._symbols.data, self._weights.data, self._next.data
        self._previous_view = self._previous.data
        starts = np.flatnonzero(self._next[:total] != total)
        self._add(_pairs(self._symbols[starts], self._symbols[starts + 1]), starts)

    def next_pair(self, min_frequency: int) -> tuple[int, int, _Places] | None:
        """Returns the most frequent pair and its possible positions (P,); None if no pair is frequent enough."""
        while self._queue:
            count, pair, _, places = heapq.heappop(self._queue)
            if self._counts[pair] == -count:
                return (pair >> _SHIFT, pair & _MASK, places) if -count >= min_frequency else None
            self._push(pair, places)
        return None

    def merge(self, left: int, right: int, merged: int, places: _Places) -> None:
        """Replaces `left` and `right` by `merged` wherever they are neighbours at `places` (P,), ascending."""
        if len(places) <= _FEW:
            self._merge_few(left, right, merged, places if isinstance(places, list) else places.tolist())
        else:
            self._merge_many(left, right, merged, np.unique(places) if isinstance(places, list) else places)

    def _merge_few(self, left: int, right: int, merged: int, places: list[int]) -> None:
        symbols, weights, following = self._views
        previous, counts, none = self._previous_view, self._counts, self._none
        appeared: dict[int, list[int]] = {}
        for first in places:
            second = following[first]
            if symbols[first] != left or symbols[second] != right:
                continue
            before, after, weight = previous[first], following[second], weights[first]
            if before != none:
                other = symbols[before] << _SHIFT
                counts[other | left] -= weight
                counts[other | merged] = counts.get(other | merged, 0) + weight
                appeared.setdefault(other | merged, []).append(before)
            if after != none:
                other = symbols[after]
                counts[right << _SHIFT | other] -= weight
                pair = merged << _SHIFT | other
                counts[pair] = counts.get(pair, 0) + weight
                appeared.setdefault(pair, []).append(first)
            symbols[first], symbols[second] = merged, _DEAD
            following[first] = after
            previous[after] = first
        for pair, where in appeared.items():
            self._push(pair, where)

    def _merge_many(self, left: int, right: int, merged: int, places: np.ndarray) -> None:
        symbols, following, previous = self._symbols, self._next, self._previous
        first = places[(symbols[places] == left) & (symbols[following[places]] == right)]
        if left == right and len(first) > 1:
            first = first[_every_other(following[first[:-1]] == first[1:])]
        if not len(first):
            return
        second = following[first]
        before, after = previous[first], following[second]
        touches = after[:-1] == first[1:]  # two adjacent merges
        follows = np.append(False, touches)
        has_before = (before != self._none) & ~follows
        has_after = (after != self._none) & ~np.append(touches, False)
        weights = self._weights[first]
        gone = np.concatenate(
            [
                _pairs(symbols[before[has_before]], left),
                _pairs(right, symbols[after[has_after]]),
                np.full(np.count_nonzero(touches), right << _SHIFT | left, np.int64),
            ]
        )
        new = np.concatenate(
            [
                _pairs(symbols[before[has_before]], merged),
                _pairs(merged, symbols[after[has_after]]),
                np.full(np.count_nonzero(touches), merged << _SHIFT | merged, np.int64),
            ]
        )
        where = np.concatenate([before[has_before], first[has_after], first[:-1][touches]])
        self._remove(gone, np.concatenate([weights[has_before], weights[has_after], weights[:-1][touches]]))
        symbols[first] = merged
        symbols[second] = _DEAD
        following[first] = after
        previous[after] = first
        self._add(new, where)

    def _remove(self, pairs: np.ndarray, weights: np.ndarray) -> None:
        if not len(pairs):
            return
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        starts = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))
        sums = np.add.reduceat(weights[order], starts)
        counts = self._counts
        for pair, weight in zip(pairs[starts].tolist(), sums.tolist(), strict=True):
            counts[pair] -= weight

    def _add(self, pairs: np.ndarray, places: np.ndarray) -> None:
        """Counts the new `pairs` at `places` and puts each into the queue."""
        if not len(pairs):
            return
        order = np.lexsort((places, pairs))
        pairs, places = pairs[order], places[order]
        starts = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))
        sums = np.add.reduceat(self._weights[places], starts).tolist()
        stops = [*starts[1:].tolist(), len(pairs)]
        counts = self._counts
        for pair, weight, start, stop in zip(pairs[starts].tolist(), sums, starts.tolist(), stops, strict=True):
            counts[pair] = counts.get(pair, 0) + weight
            self._push(pair, places[start:stop])

    def _push(self, pair: int, places: _Places) -> None:
        if self._counts[pair] > 0:
            self._serial += 1
            heapq.heappush(self._queue, (-self._counts[pair], pair, self._serial, places))


def _pairs(left: np.ndarray | int, right: np.ndarray | int) -> np.ndarray:
    """Returns pairs (P,) of ids as integers."""
    return np.asarray(left, np.int64) << _SHIFT | np.asarray(right, np.int64)


def _every_other(linked: np.ndarray) -> np.ndarray:
    """Returns True for the 1st, 3rd, 5th, ... member of each run; `linked[i]` is True if i and i + 1 are in one run."""
    numbers = np.arange(len(linked) + 1)
    run_starts = np.maximum.accumulate(np.where(np.append(True, ~linked), numbers, 0))
    return (numbers - run_starts) % 2 == 0

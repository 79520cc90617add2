"""Next-sentence pairs, as in the original BERT (Devlin et al., 2018; create_pretraining_data.py).

Lines of a document are collected up to a target length and cut at a random line into segment A and the rest. B is
either that rest (label 0) or lines of another document (label 1); then the lines that A did not use begin the next
pair. All documents advance in lockstep, one pair a round, so that a plan is built with array operations alone.

Letters: N lines, D documents, R pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from terakoya.toolkit.random_keys import bernoulli, draws, integers_below


@dataclass(frozen=True)
class PairPlan:
    """The pairs of one epoch before truncation, about 25 bytes each.

    Attributes:
        starts: (R, 2) int64, where A and B start in the store's tokens.
        lengths: (R, 2) int32, the number of tokens in A and B.
        random: (R,) int8, 1 where B comes from another document.
    """

    starts: np.ndarray
    lengths: np.ndarray
    random: np.ndarray

    def __len__(self) -> int:
        return len(self.random)


def plan_pairs(
    line_starts: np.ndarray,
    line_stops: np.ndarray,
    documents: np.ndarray,
    *,
    budget: int,
    short_sequence_probability: float,
    random_next_probability: float,
    keys_of: Callable[[np.ndarray], np.ndarray],
) -> PairPlan:
    """The pairs of an epoch in document order: a pure function of its arguments.

    `line_starts` and `line_stops` (N,) are token offsets, with the lines of a document adjacent; `documents` (D + 1,)
    is each document's first line; at least two documents have lines. `budget` is the largest number of tokens that A
    and B have together. `keys_of` returns the random keys of the epoch's documents with these numbers.
    """
    number = np.flatnonzero(np.diff(documents) > 0)
    first, last = np.asarray(documents[number], np.int64), np.asarray(documents[number + 1], np.int64)
    assert len(number) >= 2, "a random next sentence needs another document"
    keys = keys_of(number)
    zero = np.zeros(len(number), np.int64)
    target = np.full(len(number), budget, np.int64)
    short = bernoulli(draws(keys, "pairs short", zero), short_sequence_probability)
    target[short] = 2 + integers_below(draws(keys[short], "pairs target", zero[short]), max(1, budget - 1))

    parts: list[tuple[np.ndarray, ...]] = []
    active, line = np.arange(len(number)), first.copy()
    turn = 0
    while len(active):
        turns = np.full(len(active), turn)
        key, aim, begin = keys[active], target[active], line_starts[line]
        chunk_stop = np.minimum(np.searchsorted(line_stops, begin + aim) + 1, last[active])
        lines = chunk_stop - line
        a_lines = 1 + np.where(lines > 1, integers_below(draws(key, "pairs cut", turns), np.maximum(lines - 1, 1)), 0)
        random = (lines == 1) | bernoulli(draws(key, "pairs random", turns), random_next_probability)
        a_length = line_stops[line + a_lines - 1] - begin

        other = integers_below(draws(key, "pairs document", turns), len(number) - 1)
        other += other >= active
        at = first[other] + integers_below(draws(key, "pairs line", turns), last[other] - first[other])
        b_stop = np.searchsorted(line_stops, line_starts[at] + np.maximum(aim - a_length, 1)) + 1
        b_first = np.where(random, at, np.minimum(line + a_lines, chunk_stop - 1))
        b_stop = np.where(random, np.minimum(b_stop, last[other]), chunk_stop)
        b_start = line_starts[b_first]
        parts.append((active, begin, b_start, a_length, line_stops[b_stop - 1] - b_start, random))

        line = np.where(random, line + a_lines, chunk_stop)
        unfinished = line < last[active]
        active, line = active[unfinished], line[unfinished]
        turn += 1

    document, a_start, b_start, a_length, b_length, random = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    order = np.argsort(document, kind="stable")
    order = order[((a_length > 0) & (b_length > 0))[order]]
    return PairPlan(
        np.stack([a_start[order], b_start[order]], axis=1),
        np.stack([a_length[order], b_length[order]], axis=1).astype(np.int32),
        random[order].astype(np.int8),
    )


def truncate_pairs(
    starts: np.ndarray, lengths: np.ndarray, budget: int, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs truncated to `budget` tokens: new starts and lengths (B, 2) int64, from starts, lengths (B, 2), keys (B,).

    One token at a time is removed from the longer segment (B when they are equal), from its front or its back as a coin
    decides. The final lengths have a closed form; the coins are the bits of keyed draws.
    """
    lengths = lengths.astype(np.int64)
    a_length, b_length = lengths[:, 0], lengths[:, 1]
    over = a_length + b_length > budget
    a_half, b_half = -(-budget // 2), budget // 2
    a_kept = np.where(b_length < b_half, budget - b_length, np.minimum(a_length, a_half))
    b_kept = np.where(a_length < a_half, budget - a_length, np.minimum(b_length, b_half))
    kept = np.where(over[:, None], np.stack([a_kept, b_kept], axis=1), lengths)
    removed = lengths - kept
    front = np.zeros_like(removed)
    for word in range(-(-int(removed.max(initial=0)) // 64)):
        coins = np.clip(removed - 64 * word, 0, 64).astype(np.uint64)
        all_ones = ~np.uint64(0)
        bits = np.where(coins == 64, all_ones, (np.uint64(1) << np.minimum(coins, np.uint64(63))) - np.uint64(1))
        drawn = np.stack(
            [draws(keys, purpose, np.full(len(keys), word)) for purpose in ("truncate a", "truncate b")], axis=1
        )
        front += np.bitwise_count(drawn & bits)
    return starts + front, kept

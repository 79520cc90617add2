"""Blends (mixtures of stores): the store of each training row, by a formula.

Weights become integers over 65,536. One period of the blend is computed once as a Pfair schedule (Baruah et al.,
"Proportionate progress", 1996: earliest deadline first inside each unit's window), so that after any number of rows
every store is less than one row away from its exact share; the blend repeats with that period.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import numpy as np

from terakoya.errors import UserError

PERIOD = 65_536


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """`weights` as integers that sum to 65,536, by largest remainder (the first store wins a tie). Raises UserError if
    there are no weights, a weight is negative or not finite, their sum is zero, or a positive weight is too small to
    become one part in 65,536."""
    if not weights or any(not np.isfinite(weight) or weight < 0 for weight in weights) or sum(weights) <= 0:
        raise UserError(f"data.train: weights: expected numbers >= 0 with a positive sum, got {list(weights)}")
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    parts = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda store: (parts[store] - exact[store], store))
    for store in by_remainder[: PERIOD - sum(parts)]:
        parts[store] += 1
    for store, (weight, part) in enumerate(zip(weights, parts, strict=True)):
        if weight > 0 and part == 0:
            raise UserError(
                f"data.train[{store}].weight: {weight} is less than one row in {PERIOD:,} of this blend; "
                "raise it or remove the store"
            )
    return tuple(parts)


class Blend:
    """An endless sequence of rows of several stores; position n is (store, index within that store)."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` are the stores' shares of the rows, in any unit. Raises UserError as `integer_weights` does."""
        self.weights = integer_weights(weights)
        self._stores, self._ranks, self._rows_per_period = _one_period(self.weights)

    def positions(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows [start, stop) of the blend: stores (n,) int64 and indices within each store (n,) int64.

        The cost does not depend on `start`. A store's indices count up from 0 without a gap, over all periods.
        """
        periods, within = np.divmod(np.arange(start, stop, dtype=np.int64), len(self._stores))
        stores = self._stores[within]
        return stores, periods * self._rows_per_period[stores] + self._ranks[within]

    def rows_per_store(self, n: int) -> tuple[int, ...]:
        """How many of the first `n` rows come from each store."""
        periods, within = divmod(n, len(self._stores))
        part = np.bincount(self._stores[:within], minlength=len(self.weights))
        return tuple((periods * self._rows_per_period + part).tolist())


@lru_cache(maxsize=8)
def _one_period(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One period of the blend of integer `weights`: the store and the rank within that store of each row, (P,) int64,
    and the rows of each store in a period, (S,) int64."""
    divisor = gcd(*weights)
    counts = [weight // divisor for weight in weights]
    period = sum(counts)
    stores = np.zeros(period, np.int64)
    ranks = np.zeros(period, np.int64)
    # Row j of a store has to come in [floor(j * period / count), ceil((j + 1) * period / count)).
    waiting = [(0, store, 0) for store, count in enumerate(counts) if count]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for now in range(period):
        while waiting and waiting[0][0] <= now:
            _, store, rank = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(rank + 1) * period // counts[store]), store, rank))
        deadline, store, rank = heapq.heappop(ready)
        assert now < deadline, "shares that sum to one can always be scheduled"
        stores[now], ranks[now] = store, rank
        if rank + 1 < counts[store]:
            heapq.heappush(waiting, ((rank + 1) * period // counts[store], store, rank + 1))
    return stores, ranks, np.array(counts, np.int64)

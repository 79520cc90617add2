"""How sure a difference between pairs is: Student's t, the paired bootstrap, McNemar's test and its kin.

Letters: n pairs, k columns, r resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
"""The probability of every interval."""
RESAMPLES = 10_000
GROUPS = 1000
"""The bootstrap of sums draws at most this many groups of neighbours: more cost time, and change an interval by less
than its own noise."""
FEW = 20
"""Pairs below which a bootstrap's interval is known to be too narrow."""


@dataclass(frozen=True)
class Test:
    """What a sample says of a difference.

    Attributes:
        difference: its estimate.
        interval: the 95 % interval; None where there is none.
        p: of no difference, two-sided; None where there is no test.
        deviation: the standard deviation of a single difference; None where it is no part of the test.
    """

    difference: float
    interval: tuple[float, float] | None = None
    p: float | None = None
    deviation: float | None = None


def student_p(t: float, freedom: int) -> float:
    """Returns the probability of a value at least as far from 0 as `t`, by Student's distribution with a whole number
    of degrees of `freedom` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for number in range(odd, freedom - odd, 2):
        total += term
        term *= cosine * cosine * (number + 1) / (number + 2)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


def student_quantile(freedom: int) -> float:
    """Returns the value beyond which, on both sides of 0, Student's distribution has 5 %."""
    low, high = 0.0, 13.0  # 12.706 with one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > 1 - LEVEL else (low, middle)
    return high


def paired_t(one: np.ndarray, other: np.ndarray) -> Test:
    """Returns the test of the mean of `other` - `one`, (n,) each, by Student's t of the n differences; without an
    interval where n is 1."""
    return _t_test(other - one, float(np.mean(other - one)), 1.0)


def unpaired_t(one: np.ndarray, other: np.ndarray) -> Test:
    """Returns the same for two samples of n values each that are no pairs (Student's t, with a common variance)."""
    together = np.concatenate([one - one.mean(), other - other.mean()])
    return _t_test(together, float(other.mean() - one.mean()), 2.0)


def _t_test(values: np.ndarray, difference: float, samples: float) -> Test:
    """Returns the test of a `difference` of the means of `samples`, from their `values`, all of which together have the
    variance of one."""
    size = len(values) / samples
    freedom = len(values) - int(samples)
    if freedom < 1:
        return Test(difference)
    variance = float(np.sum((values - values.mean()) ** 2)) / freedom * samples
    error = math.sqrt(variance / size)
    width = student_quantile(freedom) * error
    p = student_p(difference / error, freedom) if error else float(not difference)
    return Test(difference, (difference - width, difference + width), p, math.sqrt(variance))


def bootstrap_of_sums(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0) -> Test:
    """Returns the test of a `statistic` of totals by the paired bootstrap: pairs are drawn with replacement, and both
    members of a pair come together.

    Args:
        sums: what each pair adds to the totals, (n, k).
        statistic: totals (r, k) -> the differences (r,).
    """
    if len(sums) > GROUPS:
        sums = np.stack([part.sum(axis=0) for part in np.array_split(sums, GROUPS)])
    random = np.random.default_rng(seed)
    chunk = max(1, 1_000_000 // len(sums))
    draws = []
    for first in range(0, RESAMPLES, chunk):
        chosen = random.integers(0, len(sums), (min(chunk, RESAMPLES - first), len(sums)))
        draws.append(statistic(sums[chosen].sum(axis=1)))
    return _from_draws(float(statistic(sums.sum(axis=0)[None])[0]), np.concatenate(draws))


def bootstrap(size: int, statistic: Callable[[np.ndarray], float], *, resamples: int = 2000, seed: int = 0) -> Test:
    """Returns the test of a `statistic` of the numbers of `size` pairs, for one that is no function of totals."""
    random = np.random.default_rng(seed)
    draws = np.array([statistic(random.integers(0, size, size)) for _ in range(resamples)])
    return _from_draws(statistic(np.arange(size)), draws)


def _from_draws(difference: float, draws: np.ndarray) -> Test:
    """Returns the percentile interval, and as p twice the share of draws on the other side of 0, at least that of
    one."""
    draws = draws[np.isfinite(draws)]
    if len(draws) < 2 or not math.isfinite(difference):
        return Test(difference)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    other_side = min(int(np.sum(draws <= 0)), int(np.sum(draws >= 0)))
    return Test(difference, (low, high), min(1.0, 2 * (other_side + 1) / (len(draws) + 1)))


def sign_flip_p(differences: np.ndarray) -> float:
    """Returns the exact probability, two-sided, that the sum of whole `differences` (n,) is as far from 0 as it is if
    each of them had either sign as likely. Where they are -1, 0 and 1 this is McNemar's exact test."""
    sizes, counts = np.unique(np.abs(differences[differences != 0]).astype(np.int64), return_counts=True)
    chances = np.ones(1)  # of each sum, the smallest one first
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        steps = np.zeros(2 * size * count + 1)
        ways = [math.lgamma(count + 1) - math.lgamma(heads + 1) - math.lgamma(count - heads + 1)
                for heads in range(count + 1)]  # fmt: skip
        steps[:: 2 * size] = np.exp(np.array(ways) - count * math.log(2))
        chances = np.convolve(chances, steps)
    reach = len(chances) // 2
    far = np.abs(np.arange(-reach, reach + 1)) >= abs(int(differences.sum()))
    return min(1.0, float(chances[far].sum()))

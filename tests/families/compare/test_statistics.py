"""Intervals and p against scipy, against all signs, and against what repeated samples show."""

from itertools import product

import numpy as np
import pytest

from terakoya_compare.statistics import (
    bootstrap,
    bootstrap_of_sums,
    paired_t,
    sign_flip_p,
    student_p,
    student_quantile,
    unpaired_t,
)
from terakoya_quality.finetuning.metrics import T_95


def test_students_t_is_that_of_the_tables() -> None:
    assert [student_quantile(freedom) for freedom in range(1, 30)] == pytest.approx(T_95, abs=6e-4)
    stats = pytest.importorskip("scipy.stats")
    for freedom, t in product((1, 2, 3, 4, 9, 18, 57), (0.0, 0.3, -1.7, 4.2, 12.0)):
        assert student_p(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)
    random = np.random.default_rng(1)
    one, other = random.normal(size=7), random.normal(0.5, 2, size=7)
    for mine, theirs in ((paired_t(one, other), stats.ttest_rel(other, one)),
                         (unpaired_t(one, other), stats.ttest_ind(other, one))):  # fmt: skip
        assert mine.p == pytest.approx(theirs.pvalue) and mine.interval == pytest.approx(theirs.confidence_interval())


def test_deviations_are_of_one_difference() -> None:
    one, other = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 5.0])
    assert paired_t(one, other).deviation == pytest.approx(np.std([0.5, 0.0, 1.0], ddof=1))
    both = np.var(one, ddof=1) + np.var(other, ddof=1)
    assert unpaired_t(one, other).deviation == pytest.approx(np.sqrt(both))
    single = paired_t(one[:1], other[:1])
    assert (single.difference, single.interval, single.p) == (0.5, None, None)
    assert paired_t(one, one).p == 1 and paired_t(one, one + 1).p == 0


def test_sign_flips_are_counted_exactly() -> None:
    differences = np.random.default_rng(2).integers(-3, 4, size=10)
    sums = [abs(int(np.abs(differences) @ np.array(signs))) for signs in product((1, -1), repeat=10)]
    assert sign_flip_p(differences) == pytest.approx(np.mean(np.array(sums) >= abs(differences.sum())))
    stats = pytest.importorskip("scipy.stats")
    mcnemar = np.array([1] * 13 + [-1] * 5 + [0] * 40)
    assert sign_flip_p(mcnemar) == pytest.approx(stats.binomtest(13, 18).pvalue)
    assert sign_flip_p(np.zeros(5, np.int64)) == 1


def test_a_bootstrap_has_the_error_of_the_mean() -> None:
    values = np.random.default_rng(3).normal(0.2, 1, size=(4000, 1))
    error = 1.96 * values.std() / np.sqrt(len(values))
    found = bootstrap_of_sums(values, lambda sums: sums[:, 0] / len(values))  # in groups: there are more than 1,000
    again = bootstrap(400, lambda chosen: float(values[:400][chosen].mean()))
    assert found.difference == pytest.approx(values.mean()) and found.interval is not None
    assert found.interval == pytest.approx((values.mean() - error, values.mean() + error), abs=0.05 * error)
    assert found.p is not None and found.p < 0.001 and again.interval is not None
    assert np.ptp(again.interval) == pytest.approx(2 * 1.96 * values[:400].std() / 20, rel=0.1)
    assert bootstrap(10, lambda chosen: float("nan")).p is None


@pytest.mark.nightly
def test_a_true_difference_is_in_95_of_100_intervals() -> None:
    random, inside = np.random.default_rng(4), 0
    for _ in range(300):
        tokens = random.integers(5, 200, size=60)
        differences = tokens * 0.1 + random.normal(size=60) * np.sqrt(tokens)
        found = bootstrap_of_sums(np.stack([differences, tokens], axis=1), lambda sums: sums[:, 0] / sums[:, 1])
        assert found.interval is not None
        inside += found.interval[0] <= 0.1 <= found.interval[1]
    assert 0.90 <= inside / 300 <= 0.98

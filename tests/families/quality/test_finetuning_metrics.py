"""Scores of tasks, against values counted by hand; the comments say how."""

from __future__ import annotations

import math

import numpy as np
import pytest

from terakoya_quality.finetuning import metrics

PREDICTED, GOLD = np.array([1, 1, 0, 2, 1]), np.array([1, 0, 0, 2, 2])


def test_scores_of_labels() -> None:
    assert metrics.accuracy(PREDICTED, GOLD) == 3 / 5
    # label 0: 1 of 1 predicted, 1 of 2 gold; label 1: 1 of 3, 1 of 1; label 2: 1 of 1, 1 of 2
    assert metrics.f1(PREDICTED, GOLD, 1) == 2 * 1 / (3 + 1)
    assert metrics.macro_f1(PREDICTED, GOLD) == pytest.approx((2 / 3 + 1 / 2 + 2 / 3) / 3)
    assert metrics.f1(PREDICTED, GOLD, 7) == 0
    # two labels: tp 2, tn 1, fp 1, fn 0: (2*1 - 1*0) / sqrt(3 * 2 * 2 * 1)
    assert metrics.matthews(np.array([1, 1, 1, 0]), np.array([1, 1, 0, 0])) == pytest.approx(2 / math.sqrt(12))
    # three labels, by Gorodkin's sums: c*s - sum(p*t) = 3*5 - (1*2 + 3*1 + 1*2) = 8; 25 - 11 = 14; 25 - 9 = 16
    assert metrics.matthews(PREDICTED, GOLD) == pytest.approx(8 / math.sqrt(14 * 16))
    assert metrics.matthews(np.array([1, 1]), np.array([0, 1])) == 0


def test_correlations() -> None:
    predicted, gold = np.array([1.0, 2.0, 2.0, 10.0]), np.array([0.0, 1.0, 3.0, 2.0])
    assert metrics.pearson(predicted, gold) == pytest.approx(np.corrcoef(predicted, gold)[0, 1])
    # ranks less their mean: -1.5, 0, 0, 1.5 and -1.5, -0.5, 1.5, 0.5; sums of products 3, 4.5 and 5
    assert metrics.spearman(predicted, gold) == pytest.approx(3 / math.sqrt(4.5 * 5))
    assert math.isnan(metrics.pearson(np.array([1.0, 1.0]), np.array([1.0, 2.0])))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER I-LOC", [("PER", 0, 1), ("PER", 1, 2), ("LOC", 2, 3)]),
        ("I-PER I-PER O I-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER I-PER E-PER I-PER S-LOC S-LOC", [("PER", 0, 3), ("PER", 3, 4), ("LOC", 4, 5), ("LOC", 5, 6)]),
        ("O O", []),
    ],
)
def test_spans_of_tags(tags: str, expected: list[metrics.Entity]) -> None:
    assert metrics.entities(tags.split()) == expected


def test_scores_of_spans() -> None:
    gold = [[("PER", 0, 2), ("LOC", 3, 4)], [("PER", 1, 2)]]
    guess = [[("PER", 0, 2), ("LOC", 3, 5)], []]  # one of two guesses is right, of three
    scores = metrics.span_scores(guess, gold)
    assert scores == {"f1": 2 / 5, "precision": 1 / 2, "recall": pytest.approx(1 / 3)}
    assert metrics.span_scores([[]], [[]]) == {"f1": 0, "precision": 0, "recall": 0}


def test_scores_of_answers() -> None:
    scores = metrics.answer_scores(["東京都。", "in the big Park", ""], [["東京都"], ["big  park.", "sea"], ["x"]])
    # JSQuAD: 東京都 exact; "in the big park" (15 characters) and "big park." (9) share 8
    assert scores["exact_match"] == pytest.approx(1 / 3)
    assert scores["f1"] == pytest.approx((1 + 2 * 8 / (15 + 9) + 0) / 3)
    # SQuAD: 。 is no punctuation there; "in big park" and "big park" share two words
    assert scores["squad_exact_match"] == 0
    assert scores["squad_f1"] == pytest.approx((0 + 2 * 2 / (3 + 2) + 0) / 3)


def test_the_interval_is_students() -> None:
    mean, half = metrics.mean_and_interval([0.8, 0.9, 1.0])
    assert mean == pytest.approx(0.9) and half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert metrics.mean_and_interval([0.5]) == (0.5, None)
    assert metrics.mean_and_interval([0.0, 1.0] * 40)[1] == pytest.approx(2.045 * 0.50315 / math.sqrt(80), rel=1e-3)

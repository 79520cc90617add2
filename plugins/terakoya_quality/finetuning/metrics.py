"""The scores of tasks: accuracy, F1, correlations, spans, answers; and the mean over seeds with its interval.

Arrays are (N,): one entry for each example.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
        2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1, 2, ... 29 degrees of freedom; the last one serves for more, too."""

Entity = tuple[str, int, int]
"""The type of a span, its first position and the position after its last one."""


def accuracy(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Returns the share of `predicted` (N,) that equals `gold` (N,)."""
    return float(np.mean(predicted == gold))


def f1(predicted: np.ndarray, gold: np.ndarray, label: int) -> float:
    """Returns the F1 of one `label`; 0 where neither array has it."""
    both = int(np.sum((predicted == label) & (gold == label)))
    return 2 * both / max(1, int(np.sum(predicted == label)) + int(np.sum(gold == label)))


def macro_f1(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Returns the mean of the F1 of all labels that occur in either array."""
    return float(np.mean([f1(predicted, gold, int(label)) for label in np.union1d(predicted, gold)]))


def matthews(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Returns Matthews' correlation, for any number of labels; 0 where either array has one label alone."""
    labels = np.union1d(predicted, gold)
    guessed, true = predicted[:, None] == labels, gold[:, None] == labels  # (N, labels)
    covariance = float(np.sum((guessed - guessed.mean(0)) * (true - true.mean(0))))
    spread = math.sqrt(float(np.sum((guessed - guessed.mean(0)) ** 2)) * float(np.sum((true - true.mean(0)) ** 2)))
    return covariance / spread if spread else 0.0


def pearson(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Returns Pearson's correlation; NaN where either array is constant."""
    a, b = predicted.astype(np.float64) - predicted.mean(), gold.astype(np.float64) - gold.mean()
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / spread if spread else math.nan


def spearman(predicted: np.ndarray, gold: np.ndarray) -> float:
    """Returns Spearman's correlation: Pearson's of the ranks, where equal values share the mean of their ranks."""
    return pearson(_ranks(predicted), _ranks(gold))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def entities(tags: Sequence[str]) -> list[Entity]:
    """Returns the spans in `tags` such as B-PER, I-PER, O (also E- and S-), read as conlleval does: an I- that
    continues nothing begins a span."""
    found: list[Entity] = []
    start, kind, closed = 0, "", True
    for position, tag in enumerate((*tags, "O")):
        prefix, _, name = tag.partition("-")
        inside = prefix != "O"
        if kind and (closed or not inside or prefix in "BS" or name != kind):
            found.append((kind, start, position))
            kind = ""
        if inside and not kind:
            start, kind = position, name
        closed = prefix in ("E", "S")
    return found


def span_scores(predicted: Sequence[Collection[Entity]], gold: Sequence[Collection[Entity]]) -> dict[str, float]:
    """Returns `f1`, `precision` and `recall` of spans over all examples: one is right where type, start and end are."""
    right = sum(len(set(one) & set(other)) for one, other in zip(predicted, gold, strict=True))
    guessed, true = sum(map(len, predicted)), sum(map(len, gold))
    return {
        "f1": 2 * right / max(1, guessed + true),
        "precision": right / max(1, guessed),
        "recall": right / max(1, true),
    }


def answer_scores(predicted: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns the scores of answers, for each question the best over its `gold` answers.

    `exact_match` and `f1` are JSQuAD's: lower case, single spaces, no 。 at the end, F1 over characters. `squad_...`
    are SQuAD's: also no punctuation and no English articles, F1 over words between spaces.
    """
    rules = (("", _jsquad_form, list), ("squad_", _squad_form, str.split))
    scores = {}
    for prefix, form, units in rules:
        pairs = [
            (form(guess), [form(each) for each in answers]) for guess, answers in zip(predicted, gold, strict=True)
        ]
        scores[f"{prefix}exact_match"] = _mean(
            max(float(guess == each) for each in answers) for guess, answers in pairs
        )
        scores[f"{prefix}f1"] = _mean(
            max(_overlap(units(guess), units(each)) for each in answers) for guess, answers in pairs
        )
    return scores


def _jsquad_form(text: str) -> str:
    return " ".join(text.lower().rstrip("。").split())


def _squad_form(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _overlap(guess: Sequence[str], gold: Sequence[str]) -> float:
    """Returns the F1 of two lists of units without order; of two empty ones 1."""
    if not guess or not gold:
        return float(guess == gold)
    return 2 * sum((Counter(guess) & Counter(gold)).values()) / (len(guess) + len(gold))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean of `values`, and half the width of its 95 % interval by Student's t; None of a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    return mean, quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))

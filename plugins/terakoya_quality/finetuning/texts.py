"""Tasks with one target for a text or a pair of texts: classification and regression."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from terakoya.errors import UserError
from terakoya.json_settings import short_json
from terakoya_quality.finetuning import metrics
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.task import Feature, Task, TextEncoder, check_labels, label_ids, sorted_labels

NAMED = 10
"""Labels that are named with how many examples have them."""

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class LabelledText:
    """A text, its second text if it is a pair, and its target: the label's id or a number."""

    text: str
    pair: str | None
    target: float


def read_texts(row: Row) -> tuple[str, str | None]:
    """Returns the text of `row` and None, or the two texts of a pair. Raises UserError if it has neither."""
    if "text" in row.values:
        return row.text("text"), None
    if "text1" in row.values:
        return row.text("text1"), row.text("text2")
    row.refuse(
        f'has no column "text", nor "text1" and "text2" for pairs, but {", ".join(row.values)}; name the one that is '
        "meant: --column text=NAME"
    )


class _TextTask(Task[LabelledText]):
    auto_class = "AutoModelForSequenceClassification"
    forms = (("text", "text"), ("text1", "pair"))

    def features(self, examples: Sequence[LabelledText], encoder: TextEncoder) -> list[Feature]:
        pairs = [each.pair or "" for each in examples] if any(each.pair is not None for each in examples) else None
        encoded = encoder.encode([each.text for each in examples], pairs)
        return [
            Feature([row], example.target, number)
            for number, (row, example) in enumerate(zip(encoded, examples, strict=True))
        ]


class Classification(_TextTask):
    """One of several labels."""

    name = "classification"
    columns = "text (or text1 and text2), label"
    metrics = ("accuracy", "macro_f1", "matthews", "f1")

    def __init__(self, train: Sequence[Row]) -> None:
        counts = Counter(map(read_label, train))
        self.labels = sorted_labels(set(counts))
        check_labels(self.labels, train)
        shown = ", ".join(f"{label} ({counts[label]:,})" for label in self.labels[:NAMED])
        shown += ", ..." * (len(self.labels) > NAMED)
        logger.info("%s: %d labels, and how many examples have them: %s", train[0].file, len(self.labels), shown)

    def _read(self, rows: Sequence[Row]) -> list[LabelledText]:
        ids = label_ids(self.labels, [(row, read_label(row)) for row in rows])
        return [LabelledText(*read_texts(row), id) for row, id in zip(rows, ids, strict=True)]

    def scores(
        self, examples: Sequence[LabelledText], features: Sequence[Feature], logits: Sequence[np.ndarray]
    ) -> dict[str, float]:
        """Implements `Task.scores`; `f1` is that of the second of two labels, as GLUE has it."""
        gold = np.array([example.target for example in examples])
        predicted = np.array([each.argmax() for each in logits])
        scores = {
            "accuracy": metrics.accuracy(predicted, gold),
            "macro_f1": metrics.macro_f1(predicted, gold),
            "matthews": metrics.matthews(predicted, gold),
        }
        return scores | ({"f1": metrics.f1(predicted, gold, 1)} if len(self.labels) == 2 else {})


class Regression(_TextTask):
    """A number."""

    name = "regression"
    columns = "text (or text1 and text2), label (a number)"
    metrics = ("pearson", "spearman")

    def __init__(self, train: Sequence[Row]) -> None:
        """Takes nothing from the training examples."""

    def _read(self, rows: Sequence[Row]) -> list[LabelledText]:
        examples = [LabelledText(*read_texts(row), read_number(row)) for row in rows]
        if len({each.target for each in examples}) < 2:
            raise UserError(
                f"{rows[0].file}: expected examples with at least two numbers to tell apart, found only "
                f"{examples[0].target:g}"
            )
        return examples

    def head_settings(self) -> dict[str, object]:
        return {"num_labels": 1, "problem_type": "regression"}

    def logits(self, output: object, choices: int) -> Tensor:
        return super().logits(output, choices).squeeze(-1)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(logits.float(), targets.float())

    def scores(
        self, examples: Sequence[LabelledText], features: Sequence[Feature], logits: Sequence[np.ndarray]
    ) -> dict[str, float]:
        gold, predicted = np.array([example.target for example in examples]), np.array(logits)
        return {"pearson": metrics.pearson(predicted, gold), "spearman": metrics.spearman(predicted, gold)}


def read_label(row: Row) -> str:
    """Returns the label of `row` as text. Raises UserError for anything but text, a whole number, true and false."""
    value = row.value("label")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value):
        return str(value)
    row.refuse(f"label: expected text or a whole number, got {short_json(value)}")


def read_number(row: Row) -> float:
    """Returns the label of `row` as a number. Raises UserError if it is none."""
    value = row.value("label")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        row.refuse(f"label: expected a number, got {short_json(value)}; labels in words are --task classification")
    return number

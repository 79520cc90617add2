"""Multiple choice: which of the choices answers a question, as in JCommonsenseQA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from terakoya.json_settings import short_json
from terakoya_quality.finetuning import metrics
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.task import Feature, Task, TextEncoder


@dataclass(frozen=True)
class Question:
    """A question with its choices, and the number of the right one."""

    text: str
    choices: Sequence[str]
    answer: int


class MultipleChoice(Task[Question]):
    """The right one of several choices. Every question of a task has as many."""

    name = "choice"
    columns = "question, choices (a list) or choice0, choice1, ..., label (the number of the right one, from 0)"
    metrics = ("accuracy",)
    auto_class = "AutoModelForMultipleChoice"
    forms = (("question", "choice"),)

    def __init__(self, train: Sequence[Row]) -> None:
        self.count = len(_choices(train[0]))

    def _read(self, rows: Sequence[Row]) -> list[Question]:
        return [self._question(row) for row in rows]

    def _question(self, row: Row) -> Question:
        choices, label = _choices(row), row.value("label")
        if len(choices) != self.count:
            row.refuse(f"expected {self.count} choices, as the first training example has, got {len(choices)}")
        number = int(label) if str(label).isdecimal() else -1
        if not 0 <= number < len(choices):
            row.refuse(f"label: expected the number of a choice, 0 to {len(choices) - 1}, got {short_json(label)}")
        return Question(row.text("question"), choices, number)

    def features(self, examples: Sequence[Question], encoder: TextEncoder) -> list[Feature]:
        """Implements `Task.features`: the question, with each choice in turn."""
        questions = [each.text for each in examples for _ in each.choices]
        rows = encoder.encode(questions, [choice for each in examples for choice in each.choices])
        return [
            Feature(rows[number * self.count : (number + 1) * self.count], each.answer, number)
            for number, each in enumerate(examples)
        ]

    def logits(self, output: Any, choices: int) -> Tensor:
        """Implements `Task.logits`: (B, C)."""
        return super().logits(output, choices).reshape(-1, choices)

    def scores(
        self, examples: Sequence[Question], features: Sequence[Feature], logits: Sequence[np.ndarray]
    ) -> dict[str, float]:
        predicted = np.array([each.argmax() for each in logits])
        return {"accuracy": metrics.accuracy(predicted, np.array([each.answer for each in examples]))}


def _choices(row: Row) -> list[str]:
    choices = row.values.get("choices")
    if choices is None:
        names = [f"choice{number}" for number in range(len(row.values)) if f"choice{number}" in row.values]
        choices = [row.values[name] for name in names]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) for each in choices):
        row.refuse(f"expected at least two choices, in choices or choice0, choice1, ..., got {short_json(choices)}")
    return choices

"""A plugin that keeps the curve of a run: what validations measured, beside the seconds of training before them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components.run import Run, StepReport


class Point(TypedDict):
    """One validation: the step, seconds of wall and of CPU time (all threads) and tokens trained on before it.

    ELECTRA's loss is the discriminator's, and its accuracy what the discriminator scores once it is fine-tuned.
    """

    step: int
    wall: float
    cpu: float
    tokens: int
    loss: float
    accuracy: float


class Curve:
    """The validations of one run. The time they take themselves is left out."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.tokens = self.step = 0
        self._now = self._began = (0.0, 0.0)
        self._paused = (0.0, 0.0)

    def step_ended(self, tokens: int) -> None:
        """Notes when a step ended that trained on `tokens` real tokens."""
        self._now = (time.perf_counter(), time.process_time())
        self.tokens += tokens
        self.step += 1

    def validated(self, loss: float, accuracy: float) -> None:
        """Notes a validation, which began where the last step ended; the run's time begins after the first one."""
        after = (time.perf_counter(), time.process_time())
        if not self.points:
            self._began = self._now = after
        wall, cpu = (
            now - began - paused for now, began, paused in zip(self._now, self._began, self._paused, strict=True)
        )
        self._paused = (
            self._paused[0] + after[0] - self._now[0],
            self._paused[1] + after[1] - self._now[1],
        )
        point = Point(step=self.step, wall=wall, cpu=cpu, tokens=self.tokens, loss=loss, accuracy=accuracy)
        self.points.append(point)


def reached(points: list[Point], target: float, clock: str = "cpu", measure: str = "loss") -> float | None:
    """Returns the seconds of `clock` at which the loss first was at most `target`, or `measure="accuracy"` at least, on
    the line between two validations; None where it never was."""
    sign = 1.0 if measure == "loss" else -1.0
    for before, after in pairwise(points):
        start, end = ((dict(point)[clock], sign * dict(point)[measure] - sign * target) for point in (before, after))  # type: ignore[operator]
        if end[1] <= 0.0:
            share = start[1] / (start[1] - end[1]) if start[1] > 0.0 else 0.0
            return float(start[0] + share * (end[0] - start[0]))  # type: ignore[operator]
    return None


curve: Curve | None = None
"""The curve of the run to come."""
discriminators: Path | None = None
"""Where the run's discriminator is kept at each validation, by its step; None for runs that have none."""


@hookimpl
def step_finished(run: Run, report: StepReport) -> None:
    """Notes the step."""
    if curve is not None:
        curve.step_ended(report.tokens)


@hookimpl
def validation_finished(run: Run, values: Mapping[str, Mapping[str, float]]) -> None:
    """Notes the validation on the first store."""
    if discriminators is not None:
        run.objective.exports(run.module)["discriminator"].save_pretrained(discriminators / f"step-{run.step}")
    if curve is not None:
        numbers = next(numbers for store, numbers in values.items() if store)
        loss = numbers.get("discriminator_loss", numbers["loss"])
        curve.validated(loss, numbers.get("masked_accuracy", numbers.get("token_accuracy", 0.0)))

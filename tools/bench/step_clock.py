"""A plugin that notes when each optimizer step ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components.run import StepReport
    from terakoya.training.run import Run


class Clock:
    """When steps ended. A GPU's kernels are waited for at the first and the last timed moment only."""

    def __init__(self, *, warm_up: int, steps: int) -> None:
        self.warm_up, self.last = warm_up, warm_up + steps
        self.ended: list[tuple[float, float]] = []

    @property
    def steps(self) -> int:
        """Steps to take."""
        return self.last

    def step_ended(self) -> None:
        """Notes wall time and CPU time."""
        if torch.cuda.is_available() and len(self.ended) + 1 in (self.warm_up, self.last):
            torch.cuda.synchronize()
        self.ended.append((time.perf_counter(), time.process_time()))

    def differences(self) -> list[tuple[float, float]]:
        """Wall and CPU seconds of each step after the warm-up."""
        return [
            (self.ended[number][0] - self.ended[number - 1][0], self.ended[number][1] - self.ended[number - 1][1])
            for number in range(self.warm_up, self.last)
        ]


clock: Clock | None = None
"""The clock of the run to come."""
tokens: list[int] = []
"""Real tokens of each step."""
losses: dict[str, float] = {}
"""`loss N` of each logged step N, counted from 0."""


@hookimpl
def step_finished(run: Run, report: StepReport) -> None:
    """Notes the step."""
    tokens.append(report.tokens)
    if report.values is not None:
        losses[f"loss {report.step - 1}"] = report.values["loss"]
    if clock is not None:
        clock.step_ended()

"""The length of a run and its progress, for the loop and for schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["steps", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a run. It is exact in one unit; in the other it is the expectation from the stores.

    Attributes:
        steps: optimizer steps.
        tokens: real tokens.
        unit: the unit that ends the run.
        rows: rows that the run takes, where their number ends it; the last step may hold fewer than the others.
    """

    steps: int
    tokens: int
    unit: Unit = "steps"
    rows: int | None = None

    def is_reached(self, *, step: int, tokens: int) -> bool:
        """Returns whether a run ends after `step` steps with `tokens` tokens."""
        return tokens >= self.tokens if self.unit == "tokens" else step >= self.steps

    def after_resuming(self, *, step: int, consumed_rows: int, global_rows: int) -> Length:
        """Returns this length for a run that took `consumed_rows` in its first `step` steps: where the number of rows
        ends the run, its steps follow from the remaining rows."""
        if self.rows is None:
            return self
        remaining = max(0, self.rows - consumed_rows)
        return replace(self, steps=max(1, step + math.ceil(remaining / global_rows)))

    def describe(self) -> str:
        """Returns for example `12 steps, about 5,000 tokens`."""
        steps = f"{self.steps:,} step{'s' if self.steps != 1 else ''}"
        if self.unit == "tokens":
            return f"{self.tokens:,} tokens, about {steps}"
        rows = f"{self.rows:,} rows in " if self.rows is not None else ""
        return f"{rows}{steps}, about {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run before an optimizer step, the same on every process: the only input of a schedule.

    Attributes:
        step: finished optimizer steps; this is the number of the next step, counted from 0.
        max_steps: the run's length in steps; an expectation where `unit` is tokens.
        tokens: real tokens of the finished steps.
        max_tokens: the run's length in tokens; an expectation where `unit` is steps.
        unit: the unit that ends the run.
        learning_rate: the peak, which is multiplied by the schedule's factor.
        validation: (step, loss) of each validation so far, oldest first; the loss is the mean over validation stores.
    """

    step: int
    max_steps: int
    tokens: int = 0
    max_tokens: int = 0
    unit: Unit = "steps"
    learning_rate: float = 1.0
    validation: tuple[tuple[int, float], ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """The expected tokens of a step."""
        return self.max_tokens / max(1, self.max_steps)

"""How long a run is and how far it has come: what the loop ends by and schedules look at."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["steps", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is. The end is exact in one unit and expected, from the stores, in the other.

    Attributes:
        steps: optimizer steps.
        tokens: real tokens.
        unit: which of the two the run ends by.
        rows: rows of the order that it takes, where it ends by rows; the last step may hold fewer than the others.
    """

    steps: int
    tokens: int
    unit: Unit = "steps"
    rows: int | None = None

    def reached(self, *, step: int, tokens: int) -> bool:
        """Whether a run ends after `step` steps with `tokens` tokens."""
        return tokens >= self.tokens if self.unit == "tokens" else step >= self.steps

    def after_resuming(self, *, step: int, consumed_rows: int, global_rows: int) -> Length:
        """This length for a run that took `consumed_rows` in its first `step` steps: where it ends by rows, its steps
        follow from what is left."""
        if self.rows is None:
            return self
        left = max(0, self.rows - consumed_rows)
        return replace(self, steps=max(1, step + math.ceil(left / global_rows)))

    def describe(self) -> str:
        """For example `12 steps, about 5,000 tokens`."""
        steps = f"{self.steps:,} step{'s' if self.steps != 1 else ''}"
        if self.unit == "tokens":
            return f"{self.tokens:,} tokens, about {steps}"
        rows = f"{self.rows:,} rows in " if self.rows is not None else ""
        return f"{rows}{steps}, about {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands before an optimizer step, the same on every process: all that a schedule may look at.

    Attributes:
        step: optimizer steps finished, so the number of this one, counted from 0.
        max_steps: the run's length in steps; expected where `unit` is tokens.
        tokens: real tokens that the finished steps took.
        max_tokens: the run's length in tokens; expected where `unit` is steps.
        unit: what the run ends by.
        learning_rate: the peak, which the schedule's factor multiplies.
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
        """Tokens that a step is expected to take."""
        return self.max_tokens / max(1, self.max_steps)

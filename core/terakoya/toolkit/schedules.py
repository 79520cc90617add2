"""Warm-up and decay towards `min_lr`, counted in steps or tokens: the shared parts of learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from terakoya.components import Schedule
from terakoya.components.progress import Progress, Unit
from terakoya.errors import UserError


@dataclass(frozen=True)
class Span:
    """A part of the run, and the position of a step, in one unit.

    Attributes:
        at: the position of the step.
        start, end: the positions at which the span starts and ends.
    """

    at: float
    start: float
    end: float

    @property
    def remaining(self) -> float:
        """The share of the span after the step: 1 up to the start, 0 from the end on."""
        return min(1.0, max(0.0, (self.end - self.at) / max(1, self.end - self.start)))

    @property
    def elapsed(self) -> float:
        """The share of the span before the step: 0 up to the start, 1 from the end on."""
        return min(1.0, max(0.0, (self.at - self.start) / max(1, self.end - self.start)))


class WarmupSchedule(Schedule):
    """A schedule that begins with a linear warm-up. The first step has a part of the peak already: a rate of 0 would do
    nothing.

    `warmup_steps`, `warmup_tokens` or `warmup_ratio`, a share of the run's length, is the length of the warm-up; at
    most one of them is given.
    """

    warmup_steps: NonNegativeInt = 0
    """The length of the linear warm-up; at most one of `warmup_steps`, `warmup_tokens` and `warmup_ratio` is given.
    Unit: optimizer steps."""
    warmup_tokens: NonNegativeInt = 0
    """The length of the warm-up in tokens. Unit: tokens."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The length of the warm-up as a share of the run's length, from 0 to 1."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        check_at_most_one(self, "warmup_steps", "warmup_tokens", "warmup_ratio")
        return self

    def warmup(self, progress: Progress) -> tuple[Unit, int]:
        """Returns the unit and the length of the warm-up. The unit is that of the given setting, else the run's."""
        if self.warmup_steps:
            return "steps", self.warmup_steps
        if self.warmup_tokens:
            return "tokens", self.warmup_tokens
        return progress.unit, math.ceil(self.warmup_ratio * length(progress, progress.unit))

    def warmup_factor(self, progress: Progress) -> float | None:
        """Returns the share of the peak during the warm-up, (step + 1) / warmup_steps, and None after it. In tokens,
        the numerator counts the tokens up to the end of a step of the expected size."""
        unit, warmup = self.warmup(progress)
        at = position(progress, unit)
        if at >= warmup:
            return None
        return min(1.0, (at + (1 if unit == "steps" else progress.tokens_per_step)) / warmup)


class DecaySchedule(WarmupSchedule):
    """A schedule with a warm-up, then a decay until `lr_decay_steps` or `lr_decay_tokens`, counted from the beginning
    of the run as in Megatron, then a constant rate. At most one of the two is given; without them, the decay lasts
    until the end of the run.

    `min_lr` is the learning rate at the end of the decay, not a share of the peak.
    """

    lr_decay_steps: PositiveInt | None = None
    """The step at which the decay ends; null is the end of the run. Unit: optimizer steps."""
    lr_decay_tokens: PositiveInt | None = None
    """The number of tokens at which the decay ends; null is the end of the run. Unit: tokens."""
    min_lr: NonNegativeFloat = 0.0
    """The learning rate at the end of the decay, below which it does not fall."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        check_at_most_one(self, "lr_decay_steps", "lr_decay_tokens")
        return self

    def check(self, start: Progress) -> None:
        check_min_lr(self.min_lr, start)
        span = self.decay_span(start)
        if self._given_end is not None and span.end <= span.start:
            raise UserError(
                f"schedule.lr_decay_{self._given_end}: expected more than the {round(span.start):,} "
                f"{self._given_end} of warm-up, got {round(span.end):,}"
            )

    @property
    def _given_end(self) -> Unit | None:
        return "steps" if self.lr_decay_steps else "tokens" if self.lr_decay_tokens else None

    def decay_span(self, progress: Progress) -> Span:
        """Returns the span of the decay: from the end of the warm-up to `lr_decay_*`, in the unit of that setting, else
        the run's. A warm-up in the other unit is converted by the expected tokens of a step."""
        unit = self._given_end or progress.unit
        end = self.lr_decay_steps or self.lr_decay_tokens or length(progress, unit)
        return Span(position(progress, unit), convert_unit(self.warmup(progress), unit, progress), end)

    def factor_above_floor(self, share: float, progress: Progress) -> float:
        """Returns the factor of the learning rate `min_lr + share x (peak - min_lr)`."""
        floor = self.min_lr / progress.learning_rate
        return floor + (1.0 - floor) * share


def check_at_most_one(settings: Schedule, *names: str) -> None:
    """Raises ValueError if more than one of `names` is set."""
    given = [name for name in names if getattr(settings, name)]
    if len(given) > 1:
        raise ValueError(f"expected at most one of {', '.join(names)}, got {' and '.join(given)}")


def check_min_lr(min_lr: float, start: Progress) -> None:
    """Raises UserError if `min_lr` is above the peak."""
    if min_lr > start.learning_rate:
        raise UserError(
            f"schedule.min_lr: expected at most optimizer.learning_rate, {start.learning_rate:g}, got {min_lr:g}; it "
            "is a learning rate, not a share of it"
        )


def position(progress: Progress, unit: Unit) -> int:
    """Returns how much of the run is finished, in `unit`."""
    return progress.step if unit == "steps" else progress.tokens


def length(progress: Progress, unit: Unit) -> int:
    """Returns the length of the run in `unit`."""
    return progress.max_steps if unit == "steps" else progress.max_tokens


def convert_unit(amount: tuple[Unit, int], unit: Unit, progress: Progress) -> float:
    """Converts `amount`, (unit, size), to `unit`, by the expected tokens of a step."""
    own, size = amount
    if own == unit or not size:
        return size
    per_step = max(1.0, progress.tokens_per_step)
    return size * per_step if unit == "tokens" else size / per_step

"""What schedules of the learning rate share: warming up, and falling towards `min_lr`, by steps or by tokens."""

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
    """A stretch of the run and how far into it a step is, in one unit."""

    at: float
    start: float
    end: float

    @property
    def left(self) -> float:
        """The share that is still ahead: 1 at the start and before it, 0 from the end on."""
        return min(1.0, max(0.0, (self.end - self.at) / max(1, self.end - self.start)))

    @property
    def done(self) -> float:
        """The share that is behind: 0 at the start and before it, 1 from the end on."""
        return min(1.0, max(0.0, (self.at - self.start) / max(1, self.end - self.start)))


class Warmed(Schedule):
    """A schedule that begins with a rise. Its first step has a part of the peak already: 0 would do nothing.

    `warmup_steps`, `warmup_tokens` and `warmup_ratio`, a share of the run's length, are three ways to say how long it
    rises; at most one is given.
    """

    warmup_steps: NonNegativeInt = 0
    warmup_tokens: NonNegativeInt = 0
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        at_most_one(self, "warmup_steps", "warmup_tokens", "warmup_ratio")
        return self

    def warmup(self, progress: Progress) -> tuple[Unit, int]:
        """How long it rises, and in what that is counted: the unit it is given in, or the run's."""
        if self.warmup_steps:
            return "steps", self.warmup_steps
        if self.warmup_tokens:
            return "tokens", self.warmup_tokens
        return progress.unit, math.ceil(self.warmup_ratio * length(progress, progress.unit))

    def warming(self, progress: Progress) -> float | None:
        """The share of the peak while it rises, None once it has risen: (step + 1) / warmup_steps; in tokens, those
        up to the end of a step of the expected size."""
        unit, whole = self.warmup(progress)
        behind = position(progress, unit)
        if behind >= whole:
            return None
        return min(1.0, (behind + (1 if unit == "steps" else progress.tokens_per_step)) / whole)


class Decaying(Warmed):
    """A schedule that rises, then falls until `lr_decay_steps` or `lr_decay_tokens`, counted from the run's beginning
    as Megatron does, and stays there. At most one is given; without, it falls until the run's end.

    `min_lr` is the learning rate, not a share of it, that it falls to.
    """

    lr_decay_steps: PositiveInt | None = None
    lr_decay_tokens: PositiveInt | None = None
    min_lr: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        at_most_one(self, "lr_decay_steps", "lr_decay_tokens")
        return self

    def check(self, start: Progress) -> None:
        """See `Schedule`."""
        refuse_high_floor(self.min_lr, start)
        span = self.falling(start)
        if self._given_end is not None and span.end <= span.start:
            raise UserError(
                f"schedule.lr_decay_{self._given_end}: expected more than the {round(span.start):,} "
                f"{self._given_end} of warming up, got {round(span.end):,}"
            )

    @property
    def _given_end(self) -> Unit | None:
        return "steps" if self.lr_decay_steps else "tokens" if self.lr_decay_tokens else None

    def falling(self, progress: Progress) -> Span:
        """From the end of warming up to the end of the fall, in the unit that end is given in, or the run's. What is
        given in the other unit is converted by the expected tokens of a step."""
        unit = self._given_end or progress.unit
        end = self.lr_decay_steps or self.lr_decay_tokens or length(progress, unit)
        return Span(position(progress, unit), converted(self.warmup(progress), unit, progress), end)

    def above_floor(self, share: float, progress: Progress) -> float:
        """The factor whose learning rate lies `share` of the way from `min_lr` up to the peak."""
        floor = self.min_lr / progress.learning_rate
        return floor + (1.0 - floor) * share


def at_most_one(settings: Schedule, *names: str) -> None:
    """ValueError if more than one of `names` is set."""
    given = [name for name in names if getattr(settings, name)]
    if len(given) > 1:
        raise ValueError(f"expected at most one of {', '.join(names)}, got {' and '.join(given)}")


def refuse_high_floor(min_lr: float, start: Progress) -> None:
    """UserError if `min_lr` is above the peak."""
    if min_lr > start.learning_rate:
        raise UserError(
            f"schedule.min_lr: expected at most optimizer.learning_rate, {start.learning_rate:g}, got {min_lr:g}; it "
            "is a learning rate, not a share of it"
        )


def position(progress: Progress, unit: Unit) -> int:
    """What of the run is behind, in `unit`."""
    return progress.step if unit == "steps" else progress.tokens


def length(progress: Progress, unit: Unit) -> int:
    """The length of the run in `unit`."""
    return progress.max_steps if unit == "steps" else progress.max_tokens


def converted(amount: tuple[Unit, int], unit: Unit, progress: Progress) -> float:
    """`amount`, (its unit, its size), in `unit`, by the expected tokens of a step."""
    own, size = amount
    if own == unit or not size:
        return size
    per_step = max(1.0, progress.tokens_per_step)
    return size * per_step if unit == "tokens" else size / per_step

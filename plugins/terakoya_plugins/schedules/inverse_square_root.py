"""One over the square root of the step (Vaswani et al., 2017, arXiv:1706.03762; T5, arXiv:1910.10683)."""

from __future__ import annotations

import math
from typing import Self

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.components.progress import Unit
from terakoya.toolkit.schedules import WarmupSchedule, check_at_most_one, check_min_lr, convert_unit, position

TIMESCALE = 10_000
"""Steps of constant learning rate at the beginning of T5's schedule; Transformers' default without warm-up."""


class InverseSquareRoot(WarmupSchedule):
    """Warms up, then decays as one over a square root, without an end: after three time scales to half the peak.

    `timescale`, in steps, or `timescale_tokens` sets the speed; the default is the length of the warm-up, and 10,000
    steps without warm-up. `min_lr` is the smallest learning rate.
    """

    timescale: PositiveInt | None = None
    """The time scale of the decay: after three of them the rate is half the peak. Null is the length of the warm-up,
    and 10,000 without warm-up. Unit: optimizer steps."""
    timescale_tokens: PositiveInt | None = None
    """The time scale of the decay in tokens, instead of `timescale`. Unit: tokens."""
    min_lr: NonNegativeFloat = 0.0
    """The smallest learning rate."""

    @model_validator(mode="after")
    def _one_timescale(self) -> Self:
        check_at_most_one(self, "timescale", "timescale_tokens")
        return self

    def check(self, start: Progress) -> None:
        check_min_lr(self.min_lr, start)

    def factor(self, progress: Progress) -> float:
        """sqrt(timescale / (timescale + steps or tokens since warm-up)), at least min_lr over the peak."""
        warmup = self.warmup_factor(progress)
        if warmup is not None:
            return warmup
        unit, scale = self._scale(progress)
        since = position(progress, unit) - convert_unit(self.warmup(progress), unit, progress)
        return max(self.min_lr / progress.learning_rate, math.sqrt(scale / (scale + max(0.0, since))))

    def _scale(self, progress: Progress) -> tuple[Unit, int]:
        if self.timescale_tokens:
            return "tokens", self.timescale_tokens
        if self.timescale:
            return "steps", self.timescale
        unit, length = self.warmup(progress)
        return (unit, length) if length else ("steps", TIMESCALE)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"inverse_square_root": InverseSquareRoot}

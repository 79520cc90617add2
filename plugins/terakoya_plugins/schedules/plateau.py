"""Lower whenever validation has stopped improving: torch's ReduceLROnPlateau as a function of the losses so far."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import WarmupSchedule, check_min_lr


class Plateau(WarmupSchedule):
    """Rises, then stays until more than `patience` validations in a row are no better than the best one; then goes on
    with `decay_factor` of the learning rate, never below `min_lr`. The first validation comes before the first step.

    Settings are torch's, but for `decay_factor`, which it calls factor.
    """

    needs_validation: ClassVar[bool] = True

    decay_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    patience: NonNegativeInt = 10
    threshold: NonNegativeFloat = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: NonNegativeInt = 0
    min_lr: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-8

    def check(self, start: Progress) -> None:
        """See `Schedule`."""
        check_min_lr(self.min_lr, start)

    def factor(self, progress: Progress) -> float:
        """The share of the peak that warming up has reached, or what the validations so far have left of it if that is
        less."""
        warming = self.warmup_factor(progress)
        return min(1.0 if warming is None else warming, self._left(progress) / progress.learning_rate)

    def _left(self, progress: Progress) -> float:
        """The learning rate after the validations so far."""
        learning_rate, best, bad, cooling = progress.learning_rate, math.inf, 0, 0
        for _, loss in progress.validation:
            bound = best * (1.0 - self.threshold) if self.threshold_mode == "rel" else best - self.threshold
            if loss < bound:
                best, bad = loss, 0
            else:
                bad += 1
            if cooling:
                cooling, bad = cooling - 1, 0
            if bad > self.patience:
                lower = max(learning_rate * self.decay_factor, self.min_lr)
                if learning_rate - lower > self.eps:
                    learning_rate = lower
                cooling, bad = self.cooldown, 0
        return learning_rate


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `plateau`."""
    return {"plateau": Plateau}

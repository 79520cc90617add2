"""A learning rate that drops when validation stops improving: ReduceLROnPlateau as a function of all losses so far."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import WarmupSchedule, check_min_lr


class Plateau(WarmupSchedule):
    """Warms up, then multiplies the learning rate by `decay_factor` when more than `patience` validations in a row are
    no better than the best one, never below `min_lr`. The first validation comes before the first step.

    Settings are torch's, except that `decay_factor` is torch's `factor`.
    """

    needs_validation: ClassVar[bool] = True

    decay_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The learning rate is multiplied by this at a plateau; torch's `factor`."""
    patience: NonNegativeInt = 10
    """The number of validations in a row without an improvement that are tolerated. Unit: validations."""
    threshold: NonNegativeFloat = 1e-4
    """By how much a validation loss has to be below the best one to count as an improvement."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """Whether `threshold` is a share of the best loss (`rel`) or a difference (`abs`)."""
    cooldown: NonNegativeInt = 0
    """The number of validations after a reduction that are not counted. Unit: validations."""
    min_lr: NonNegativeFloat = 0.0
    """The smallest learning rate."""
    eps: NonNegativeFloat = 1e-8
    """A reduction by less than this is left out."""

    def check(self, start: Progress) -> None:
        check_min_lr(self.min_lr, start)

    def factor(self, progress: Progress) -> float:
        """The smaller of the share of the peak reached in warm-up, and the share that remains after the validations so
        far."""
        warmup = self.warmup_factor(progress)
        return min(1.0 if warmup is None else warmup, self._reduced_rate(progress) / progress.learning_rate)

    def _reduced_rate(self, progress: Progress) -> float:
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
    return {"plateau": Plateau}

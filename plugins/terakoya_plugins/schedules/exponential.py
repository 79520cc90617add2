"""Exponential decay: the same ratio from each step to the next."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Exponential(DecaySchedule):
    """Warms up, then decays by the same ratio from each step to the next, to `decay_rate` of the peak at the end of the
    decay; never below `min_lr`."""

    decay_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The share of the peak at the end of the decay."""

    def factor(self, progress: Progress) -> float:
        warmup = self.warmup_factor(progress)
        if warmup is not None:
            return warmup
        return max(self.min_lr / progress.learning_rate, self.decay_rate ** self.decay_span(progress).elapsed)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"exponential": Exponential}

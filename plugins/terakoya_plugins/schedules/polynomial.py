"""Polynomial decay, as in Transformers and the original BERT's code."""

from __future__ import annotations

from pydantic import PositiveFloat

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Polynomial(DecaySchedule):
    """Warms up, then decays to `min_lr` as the remaining share of the decay, to the power `power`."""

    power: PositiveFloat = 1.0
    """The power of the remaining share of the decay; 1 is linear."""

    def factor(self, progress: Progress) -> float:
        warmup = self.warmup_factor(progress)
        if warmup is not None:
            return warmup
        return self.factor_above_floor(self.decay_span(progress).remaining ** self.power, progress)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"polynomial": Polynomial}

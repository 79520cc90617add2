"""Polynomial decay, as in Transformers and the original BERT's code."""

from __future__ import annotations

from pydantic import PositiveFloat

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Polynomial(DecaySchedule):
    """Rises, then falls to `min_lr` as the share of the fall that is ahead, to the power `power`."""

    power: PositiveFloat = 1.0

    def factor(self, progress: Progress) -> float:
        """min_lr + (peak - min_lr) left ** power, over the peak."""
        warming = self.warmup_factor(progress)
        if warming is not None:
            return warming
        return self.factor_above_floor(self.decay_span(progress).remaining ** self.power, progress)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `polynomial`."""
    return {"polynomial": Polynomial}

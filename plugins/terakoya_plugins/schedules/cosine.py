"""Half a cosine (Loshchilov and Hutter, 2017, arXiv:1608.03983) down to `min_lr`, held there: Megatron-LM's formula."""

from __future__ import annotations

import math

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Cosine(DecaySchedule):
    """Rises, then falls along half a cosine to `min_lr`, and stays there."""

    def factor(self, progress: Progress) -> float:
        """min_lr + (peak - min_lr) (1 + cos(pi done)) / 2, over the peak."""
        warming = self.warmup_factor(progress)
        if warming is not None:
            return warming
        return self.factor_above_floor((1.0 + math.cos(math.pi * self.decay_span(progress).elapsed)) / 2.0, progress)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `cosine`."""
    return {"cosine": Cosine}

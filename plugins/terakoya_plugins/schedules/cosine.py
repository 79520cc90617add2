"""Half a cosine (Loshchilov and Hutter, 2017, arXiv:1608.03983) to `min_lr`, then constant: Megatron-LM's formula."""

from __future__ import annotations

import math

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Cosine(DecaySchedule):
    """Warms up, then decays along half a cosine to `min_lr`, and stays there."""

    def factor(self, progress: Progress) -> float:
        warmup = self.warmup_factor(progress)
        if warmup is not None:
            return warmup
        return self.factor_above_floor((1.0 + math.cos(math.pi * self.decay_span(progress).elapsed)) / 2.0, progress)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"cosine": Cosine}

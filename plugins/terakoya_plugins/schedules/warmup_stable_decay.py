"""Warm-up, a stable phase at the peak, a short decay: WSD (Hu et al., 2024, arXiv:2404.06395)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.components.progress import Unit
from terakoya.toolkit.schedules import DecaySchedule, Span, check_at_most_one, convert_unit, length

Shape = Literal["linear", "cosine", "1-sqrt"]

RISING: Mapping[Shape, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: (1.0 - math.cos(math.pi * done)) / 2.0,
    "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
}
FALLING: Mapping[Shape, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2.0,
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}
"""Transformers' shapes: from the completed share of the phase to the share of the peak."""

LENGTHS = ("decay_steps", "decay_tokens", "decay_ratio")
"""The settings of which one is the length of the decay."""
DECAY_RATIO = 0.1
"""The share of the run that the decay needs, according to WSD's authors."""


class WarmupStableDecay(DecaySchedule):
    """Warms up, stays at the peak, and decays to `min_lr` in the last `decay_steps`, `decay_tokens` or `decay_ratio` of
    the run (by default a tenth) before its end, or before `lr_decay_steps` or `lr_decay_tokens`."""

    decay_steps: NonNegativeInt | None = None
    """The length of the decay; at most one of `decay_steps`, `decay_tokens` and `decay_ratio` is given, and 0 is no
    decay. Without them it is a tenth of the run. Unit: optimizer steps."""
    decay_tokens: NonNegativeInt | None = None
    """The length of the decay in tokens; 0 is no decay. Unit: tokens."""
    decay_ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """The length of the decay as a share of the run's length, from 0, which is no decay, to 1."""
    warmup_type: Shape = "linear"
    """The shape of the warm-up."""
    decay_type: Shape = "cosine"
    """The shape of the decay."""

    @model_validator(mode="after")
    def _one_decay(self) -> Self:
        check_at_most_one(self, *LENGTHS)
        return self

    def decay_span(self, progress: Progress) -> Span:
        """The span of the decay, which does not begin before the end of warm-up."""
        whole = super().decay_span(progress)
        unit: Unit = self._given_end or progress.unit
        if self.decay_steps:
            decay = convert_unit(("steps", self.decay_steps), unit, progress)
        elif self.decay_tokens:
            decay = convert_unit(("tokens", self.decay_tokens), unit, progress)
        elif self.decay_ratio or all(getattr(self, name) is None for name in LENGTHS):
            decay = (self.decay_ratio or DECAY_RATIO) * length(progress, unit)
        else:
            decay = 0
        return Span(whole.at, max(whole.start, whole.end - decay), whole.end)

    def factor(self, progress: Progress) -> float:
        """`warmup_type` in warm-up, then 1, then `decay_type` in the decay, above `min_lr`."""
        warmup = self.warmup_factor(progress)
        if warmup is not None:
            return RISING[self.warmup_type](warmup)
        return self.factor_above_floor(FALLING[self.decay_type](self.decay_span(progress).elapsed), progress)


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"warmup_stable_decay": WarmupStableDecay}

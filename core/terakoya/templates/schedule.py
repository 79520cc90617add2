"""The schedule `example`: a linear warm-up, then half a cosine down to a share of the peak."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, NonNegativeInt
from terakoya import hookimpl
from terakoya.components import Schedule


class Example(Schedule):
    """Fields are the keys of the parameter JSON."""

    warmup_steps: NonNegativeInt = 0
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """What is left of the peak at the end."""

    def factor(self, step: int, *, max_steps: int) -> float:
        """What the peak learning rate is multiplied with in step `step` (from 0) of `max_steps`. A pure function: a run
        that resumes asks for a step in the middle."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `example`: `"schedule": {"type": "example"}`."""
    return {"example": Example}

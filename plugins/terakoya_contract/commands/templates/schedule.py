"""The schedule `example`: a linear warm-up, then half a cosine down to a share of the peak."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, NonNegativeInt
from terakoya import hookimpl
from terakoya.components import Progress, Schedule


class Example(Schedule):
    """Fields are the keys of the parameter JSON."""

    warmup_steps: NonNegativeInt = 0
    """Steps in which the factor rises from 0 to 1."""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """The share of the peak at the end."""

    def factor(self, progress: Progress) -> float:
        """Returns the factor of the peak learning rate in step `progress.step` (from 0) of `progress.max_steps`. This
        is a pure function: a resumed run starts in the middle."""
        step, warmup = progress.step, self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, progress.max_steps - warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Registers `example`: `"schedule": {"type": "example"}`."""
    return {"example": Example}

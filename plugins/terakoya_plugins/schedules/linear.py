"""Linear warm-up, then linear decay, the schedule of the original BERT; or both at once, that of ELECTRA."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Linear(DecaySchedule):
    """Rises, then falls in a straight line to `min_lr`, 0 if nothing else is said."""

    simultaneous: bool = False
    """Whether the fall begins at the first step and warming up is multiplied with it: the original ELECTRA's. It is
    counted in steps, to the end of the run."""

    @model_validator(mode="after")
    def _steps_alone(self) -> Self:
        if self.simultaneous and (self.warmup_tokens or self.lr_decay_steps or self.lr_decay_tokens):
            raise ValueError("simultaneous: goes with warmup_steps or warmup_ratio, and falls to the end of the run")
        return self

    def factor(self, progress: Progress) -> float:
        """The share of the peak that warming up has reached, then the share of the fall that is still ahead, above
        `min_lr`; if `simultaneous`, (max_steps - step) / max_steps, while warming up times the first."""
        warming = self.warmup_factor(progress)
        if self.simultaneous:
            left = max(0.0, (progress.max_steps - progress.step) / progress.max_steps)
            return self.factor_above_floor(left, progress) * (1.0 if warming is None else warming)
        return self.factor_above_floor(self.decay_span(progress).remaining, progress) if warming is None else warming


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `linear`."""
    return {"linear": Linear}

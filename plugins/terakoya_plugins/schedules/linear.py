"""Linear warm-up, then linear decay, as in the original BERT; or both at once, as in the original ELECTRA."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import DecaySchedule


class Linear(DecaySchedule):
    """Warms up, then decays linearly to `min_lr`, by default 0."""

    simultaneous: bool = False
    """Whether the decay begins at the first step and is multiplied by the warm-up, as in the original ELECTRA. It is
    counted in steps, to the end of the run."""

    @model_validator(mode="after")
    def _steps_alone(self) -> Self:
        if self.simultaneous and (self.warmup_tokens or self.lr_decay_steps or self.lr_decay_tokens):
            raise ValueError("simultaneous: needs warmup_steps or warmup_ratio, and decays to the end of the run")
        return self

    def factor(self, progress: Progress) -> float:
        """The share of the peak reached in warm-up, then the remaining share of the decay, above `min_lr`; with
        `simultaneous`, (max_steps - step) / max_steps above `min_lr`, in warm-up times the share reached."""
        warmup = self.warmup_factor(progress)
        if self.simultaneous:
            remaining = max(0.0, (progress.max_steps - progress.step) / progress.max_steps)
            return self.factor_above_floor(remaining, progress) * (1.0 if warmup is None else warmup)
        return self.factor_above_floor(self.decay_span(progress).remaining, progress) if warmup is None else warmup


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"linear": Linear}

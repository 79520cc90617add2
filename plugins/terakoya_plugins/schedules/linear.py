"""Linear warm-up, then linear decay to zero, the schedule of the original BERT; or both at once, that of ELECTRA."""

from __future__ import annotations

from pydantic import NonNegativeInt

from terakoya import hookimpl
from terakoya.components import Schedule


class Linear(Schedule):
    """Rises over `warmup_steps`, falls to 0 at `max_steps`."""

    warmup_steps: NonNegativeInt = 0
    simultaneous: bool = False
    """Whether the fall begins at the first step and warming up is multiplied with it: the original ELECTRA's."""

    def factor(self, step: int, *, max_steps: int) -> float:
        """(step + 1) / warmup_steps while warming up, then (max_steps - step) / (max_steps - warmup_steps); if
        `simultaneous`, (max_steps - step) / max_steps, while warming up times (step + 1) / warmup_steps."""
        if self.simultaneous:
            return max(0.0, (max_steps - step) / max_steps) * min(1.0, (step + 1) / max(1, self.warmup_steps))
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return max(0.0, (max_steps - step) / max(1, max_steps - self.warmup_steps))


class Constant(Schedule):
    """Rises over `warmup_steps` and stays."""

    warmup_steps: NonNegativeInt = 0

    def factor(self, step: int, *, max_steps: int) -> float:
        """(step + 1) / warmup_steps while warming up, then 1."""
        return min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `linear` and `constant`."""
    return {"linear": Linear, "constant": Constant}

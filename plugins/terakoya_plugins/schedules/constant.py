"""A constant learning rate after warm-up."""

from __future__ import annotations

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import WarmupSchedule


class Constant(WarmupSchedule):
    """Warms up, then stays at the peak."""

    def factor(self, progress: Progress) -> float:
        """The share of the peak reached in warm-up, then 1."""
        warmup = self.warmup_factor(progress)
        return 1.0 if warmup is None else warmup


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Registers `constant`."""
    return {"constant": Constant}

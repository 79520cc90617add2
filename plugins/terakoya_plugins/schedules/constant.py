"""A constant learning rate after warm-up."""

from __future__ import annotations

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import WarmupSchedule


class Constant(WarmupSchedule):
    """Warms up, then stays at the peak."""

    def factor(self, progress: Progress) -> float:
        warmup = self.warmup_factor(progress)
        return 1.0 if warmup is None else warmup


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    return {"constant": Constant}

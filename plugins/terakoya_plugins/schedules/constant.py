"""A learning rate that rises and stays."""

from __future__ import annotations

from terakoya import hookimpl
from terakoya.components import Progress, Schedule
from terakoya.toolkit.schedules import WarmupSchedule


class Constant(WarmupSchedule):
    """Rises and stays at the peak."""

    def factor(self, progress: Progress) -> float:
        """The share of the peak that warming up has reached, then 1."""
        warming = self.warmup_factor(progress)
        return 1.0 if warming is None else warming


@hookimpl
def register_schedules() -> dict[str, type[Schedule]]:
    """Offers `constant`."""
    return {"constant": Constant}

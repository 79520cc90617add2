"""The event plugin `example`: counts the steps that were slow, and writes the number with each validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import Run, StepReport


class Example(EventPlugin):
    """Fields are the keys of its entry in `events`."""

    slow_seconds: float = 10.0
    """A step that takes longer than this is slow."""

    def start(self, run: Run) -> EventListener:
        return Listener(self.slow_seconds)


class Listener(EventListener):
    """Overrides the events that it listens to. The settings are frozen, so state is kept here."""

    def __init__(self, slow_seconds: float) -> None:
        self.slow_seconds = slow_seconds
        self.slow = 0

    def step_finished(self, run: Run, report: StepReport) -> None:
        self.slow += report.seconds > self.slow_seconds

    def evaluate(self, run: Run) -> Mapping[str, float]:
        """Called on every rank at each validation; the numbers must be equal on all ranks: those of rank 0, whose
        `state` is saved. A sum of what each rank has counted would count it again after a resume."""
        return {"slow_steps": run.reduce({"slow": float(self.slow) if run.rank == 0 else 0.0})["slow"]}

    def state(self) -> Any:
        """Returns what a resumed run must know; what rank 0 returns is saved."""
        return {"slow": self.slow}

    def load(self, state: Any) -> None:
        """Restores the `state` of rank 0, on every rank, of which there may be more or fewer now."""
        self.slow = state["slow"]


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    """Registers `example`: `"events": {"example": {}}`."""
    return {"example": Example}

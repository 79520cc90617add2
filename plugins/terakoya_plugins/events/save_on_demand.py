"""Saves a checkpoint when somebody asks for one from outside: `terakoya save RUN` writes RUN/save.request."""

from __future__ import annotations

import time
from contextlib import suppress

from pydantic import NonNegativeFloat

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import SAVE_REQUEST, Run, StepReport


class SaveOnDemand(EventPlugin):
    """Saves after a step when the file RUN/save.request appears, and removes the file. Every run does so."""

    always = True

    every_seconds: NonNegativeFloat = 1.0
    """How often rank 0 looks for the file, at most. Unit: seconds."""

    def start(self, run: Run) -> EventListener:
        return _Listener(self)


class _Listener(EventListener):
    def __init__(self, settings: SaveOnDemand) -> None:
        self.settings = settings
        self.next_look = 0.0

    def run_started(self, run: Run) -> None:
        if run.rank == 0:
            (run.folder / SAVE_REQUEST).unlink(missing_ok=True)  # of an earlier start, which cannot answer any more

    def step_finished(self, run: Run, report: StepReport) -> None:
        if run.rank != 0 or (now := time.monotonic()) < self.next_look:
            return
        self.next_look = now + self.settings.every_seconds
        with suppress(OSError):
            (run.folder / SAVE_REQUEST).unlink()
            run.request_save()


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"save_on_demand": SaveOnDemand}

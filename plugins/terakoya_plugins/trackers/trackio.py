"""Trackio: a local dashboard (`trackio show`), or a Space on the Hugging Face Hub.

A resumed run continues the Trackio run of its name. After `spikes.action` `rollback` steps have other values; they go
into a run NAME-attempt-2, so that none has two. Credentials for a Space come from `hf auth login`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun
from terakoya.errors import import_extra


class Trackio(Tracker):
    """Fields have the names of the arguments of `trackio.init`."""

    project: str = "terakoya"
    """The Trackio project."""
    name: str | None = None
    """The name of the Trackio run; null is that of the run folder."""
    space_id: str | None = None
    """The Space that shows the dashboard, such as `me/my-dashboard`; null stays on this machine."""

    def check(self) -> None:
        import_extra("trackio", "trackio", "tracker trackio")

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the Trackio run.

        Raises:
            UserError: Trackio is not installed.
        """
        trackio = import_extra("trackio", "trackio", "tracker trackio")
        name = self.name or run_folder.resolve().name

        def init(attempt: int) -> Any:
            return trackio.init(
                project=self.project,
                name=name if attempt == 1 else f"{name}-attempt-{attempt}",
                space_id=self.space_id,
                config=dict(parameters),
                resume="allow",
                embed=False,
            )

        return _TrackioRun(init)


class _TrackioRun:
    def __init__(self, init: Callable[[int], Any]) -> None:
        self.init = init
        self.attempt = 1
        self.run = init(1)

    def begin(self, step: int, attempt: int) -> None:
        if attempt != self.attempt:
            self.run.finish()
            self.attempt = attempt
            self.run = self.init(attempt)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    return {"trackio": Trackio}

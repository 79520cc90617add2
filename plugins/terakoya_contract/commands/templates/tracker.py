"""The tracker `example`: every number as a line of RUN/example.csv."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun


class Example(Tracker):
    """Fields are the keys of its entry in `trackers`."""

    digits: int = 6
    """Significant digits of a number."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the tracker. Called once, on rank 0, in its own thread: it may be slow or fail, the run continues."""
        return Open((run_folder / "example.csv").open("a", encoding="utf-8"), self.digits)


class Open:
    """The open tracker. The settings are frozen, so state is kept here."""

    def __init__(self, file: IO[str], digits: int) -> None:
        self.file = file
        self.digits = digits

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.writelines(f"{step},{name},{value:.{self.digits}g}\n" for name, value in values.items())
        self.file.flush()

    def close(self) -> None:
        self.file.close()


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    """Registers `example`: `"trackers": [{"type": "example"}]`."""
    return {"example": Example}

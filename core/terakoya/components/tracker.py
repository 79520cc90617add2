"""Trackers of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from terakoya.components.base import Component


class TrackerRun(Protocol):
    """An open tracker, called from one background thread. It may be slow and may raise: the loop never waits for it.

    It may have a method `log_text(step, name, text)`, which receives texts, such as samples.

    It may have a method `begin(step, attempt)`, which is called before the first values of a start: they are those of
    the steps after `step`, in the attempt `attempt`, which is 1 and one more for each time that `spikes.action`
    `rollback` made the run go back. Steps that come again in the same attempt have the same values, except times; in
    another attempt they have others, and what was logged of them before was undone.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker(Component):
    """A destination for the metrics of a run, such as TensorBoard."""

    def check(self) -> None:
        """Raises UserError if the tracker cannot be opened on this machine, for example without its library. `train
        --dry-run` calls it; in a run a tracker that does not open is a warning."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the tracker for the run in `run_folder` (rank 0 only)."""
        raise NotImplementedError

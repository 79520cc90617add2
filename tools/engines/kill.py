"""A plugin that ends the process of rank KILL_RANK with SIGKILL after the step KILL_AFTER, before it is saved."""

from __future__ import annotations

import os
import signal
from typing import Any

from terakoya import hookimpl


@hookimpl
def step_finished(run: Any, report: Any) -> None:
    """Kills this process if both match."""
    if report.step == int(os.environ.get("KILL_AFTER", "0")) and run.rank == int(os.environ["KILL_RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)

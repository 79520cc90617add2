"""A plugin that ends its process with SIGKILL after the step KILL_AFTER, before that is saved, where its rank is
KILL_RANK."""

from __future__ import annotations

import os
import signal
from typing import Any

from terakoya import hookimpl


@hookimpl
def step_finished(run: Any, report: Any) -> None:
    """Dies, if this is the step and the process."""
    if report.step == int(os.environ.get("KILL_AFTER", "0")) and run.rank == int(os.environ["KILL_RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)

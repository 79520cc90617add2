"""A plugin that makes the surroundings of a run unkind, where environment variables say; tests load it with
`--plugin`."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

from terakoya import hookimpl

if "OPEN_FILES" in os.environ:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["OPEN_FILES"]),) * 2)


@hookimpl
def step_finished(run: Any, report: Any) -> None:
    """Makes each step longer by `STEP_SECONDS`."""
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))

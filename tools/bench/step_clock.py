"""A plugin that notes when each optimizer step ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.training.run import Run, StepReport

ended: list[tuple[int, float, float]] = []
"""Tokens, seconds of wall time and seconds of CPU time (all threads of the process) at the end of each step."""


@hookimpl
def step_finished(run: Run, report: StepReport) -> None:
    """Notes the step."""
    ended.append((report.tokens, time.perf_counter(), time.process_time()))

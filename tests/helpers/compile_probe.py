"""A plugin that makes compilation cheap, and notes how many graphs there are after each step.

It notes them in the file `COMPILE_PROBE`-RANK, a number a step.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch._dynamo.utils import counters

from terakoya import hookimpl
from terakoya.components.run import Run, StepReport
from terakoya.training.model import compilation

compilation.BACKEND = "aot_eager"


@hookimpl
def step_finished(run: Run, report: StepReport) -> None:
    """Appends the number of graphs so far."""
    assert not counters["graph_break"]
    with Path(f"{os.environ['COMPILE_PROBE']}-{run.rank}").open("a") as file:
        file.write(f"{counters['stats'].get('unique_graphs', 0)}\n")

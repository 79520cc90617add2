"""The launcher `example`: a shell script, run on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.errors import UserError


class Example(Launcher):
    """Fields are settings of the destination where jobs run."""

    threads: int = 1
    """OMP_NUM_THREADS of the command."""

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """Returns the files for `folder` that start `job`, and the commands. Starts nothing, so that a user can read
        them first; `submit` runs the commands by default."""
        if len(job.batch_size) > 1:
            raise UserError(f"launcher example: batch_size is for {len(job.batch_size)} nodes; expected one")
        enter = f"cd {shlex.quote(str(job.folder))}"
        command = shlex.join([sys.executable, "-m", "terakoya", *job.arguments])
        script = f"#!/bin/bash\n{enter}\nexport OMP_NUM_THREADS={self.threads}\nexec {command}\n"
        return LaunchPlan({"run.sh": script}, [shlex.join(["bash", str(folder / "run.sh")])])


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    return {"example": Example}

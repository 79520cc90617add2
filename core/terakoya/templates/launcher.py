"""The launcher `example`: a shell script, run on this machine."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from terakoya import hookimpl
from terakoya.components import Launcher
from terakoya.errors import UserError


class Example(Launcher):
    """Fields are settings of every job."""

    threads: int = 1
    """OMP_NUM_THREADS of the command."""

    def plan(self, job: Mapping[str, Any]) -> Mapping[str, str]:
        """The exact files that would start `job`, name -> content; `job["command"]` is a list of words. Starts
        nothing, so that a user can read it first."""
        if not job.get("command"):
            raise UserError('launcher example: the job has no "command"; give it the words of one')
        return {"run.sh": f"#!/bin/sh\nexport OMP_NUM_THREADS={self.threads}\nexec {shlex.join(job['command'])}\n"}

    def submit(self, job: Mapping[str, Any]) -> Iterator[str]:
        """Starts `job` and says what it did, line by line."""
        done = subprocess.run(["sh", "-c", self.plan(job)["run.sh"]], check=False)
        yield f"run.sh ended with {done.returncode}"


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `example`."""
    return {"example": Example}

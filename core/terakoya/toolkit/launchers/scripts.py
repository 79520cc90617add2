"""What the scripts of launchers share: bash that sets a place up, and which ends are not started again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from terakoya.components import Job

FINAL_EXIT_CODES = "0 | 2 | 75 | 130 | 143"
"""Exit codes, for bash's `case`, after which starting again helps nobody: finished, an error that somebody must mend,
asked to stop and saved, Ctrl-C, SIGTERM."""


def script_head(job: Job, setup: Sequence[str]) -> str:
    """The first lines in the place where `job` runs: its folder, the programs found here, and `setup`, a line each."""
    programs = shlex.quote(str(Path(sys.executable).parent))
    lines = ["set -euo pipefail", f'export PATH={programs}:"$PATH"', f"cd {shlex.quote(str(job.folder))}"]
    if setup:  # what clusters have their users source may read variables that are not set
        lines += ["set +u", *setup, "set -u"]
    return "".join(f"{line}\n" for line in lines)


def limit_threads(processes: int) -> str:
    """A line that shares a node's cores among its `processes`, unless somebody has set OMP_NUM_THREADS."""
    cores = "$(nproc)" if processes == 1 else f"$(( $(nproc) > {processes} ? $(nproc) / {processes} : 1 ))"
    return f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cores}}}"\n'


def quote(*arguments: str) -> str:
    """`arguments` quoted for a shell."""
    return shlex.join(arguments)

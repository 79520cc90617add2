"""Shared parts of the bash scripts of launchers: their first lines, and the exit codes after which a run is not
restarted."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from terakoya.components import Job

FINAL_EXIT_CODES = "0 | 2 | 3 | 75 | 130 | 143"
"""Exit codes, for bash's `case`, after which a restart is useless: finished, an error that the user must fix, training
that diverged, stopped on request with a checkpoint, Ctrl-C, SIGTERM. 74 is not among them: a disk or file server that
did not answer."""


def script_head(job: Job, setup: Sequence[str]) -> str:
    """Returns the first lines of a script that runs `job`: the programs of this environment, the working folder, and
    the lines of `setup`."""
    programs = shlex.quote(str(Path(sys.executable).parent))
    lines = ["set -euo pipefail", f'export PATH={programs}:"$PATH"', f"cd {shlex.quote(str(job.folder))}"]
    if language := os.environ.get("TERAKOYA_LANG"):  # ssh does not pass it on
        lines.append(f"export TERAKOYA_LANG={shlex.quote(language)}")
    if setup:  # setup files of clusters may read unset variables
        lines += ["set +u", *setup, "set -u"]
    return "".join(f"{line}\n" for line in lines)


def define_newest(job: Job) -> str:
    """Returns a line that defines `newest`, which prints the newest checkpoint in the run's folder that was trained
    there. One that was fetched from the run's place was not, and `place.json` names it."""
    run = quote(str(job.run))
    steps = f"ls {run}/checkpoints 2> /dev/null | grep '^step-'"
    if job.kept_in is not None:
        steps += f""" | grep -vFx "$(sed -n 's/.*"fetched": "\\([^"]*\\)".*/\\1/p' {run}/place.json 2> /dev/null)\""""
    return f"newest() {{ {steps} | tail -n 1 || true; }}"


def divide_arguments(job: Job) -> tuple[tuple[str, ...], Path, tuple[str, ...]]:
    """Returns the options before `train`, the parameter file, and the options after it."""
    arguments = job.arguments
    verb = next(index for index in range(0, len(arguments), 2) if not arguments[index].startswith("--"))
    assert arguments[verb] == "train", arguments
    return arguments[:verb], Path(arguments[verb + 1]), arguments[verb + 2 :]


def with_parameters(job: Job, file: Path) -> tuple[Job, Path]:
    """Returns `job` with the parameter file `file`, and the one that it had."""
    before, own, after = divide_arguments(job)
    return replace(job, arguments=(*before, "train", str(file), *after)), own


def files_of(job: Job) -> list[Path]:
    """Returns the files that the command of `job` names: its parameters, and the plugins that are no modules."""
    if job.module != "terakoya":
        return []
    pairs = zip(job.arguments[::2], job.arguments[1::2], strict=False)
    paths = [(option, job.folder / value) for option, value in pairs if option in ("--plugin", "train")]
    return [path for option, path in paths if option == "train" or path.exists()]


def limit_threads(processes: int) -> str:
    """Returns a line that divides a node's cores among its `processes`, unless OMP_NUM_THREADS is set already."""
    cores = "$(nproc)" if processes == 1 else f"$(( $(nproc) > {processes} ? $(nproc) / {processes} : 1 ))"
    return f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cores}}}"\n'


def quote(*arguments: str) -> str:
    """Returns `arguments` quoted for a shell."""
    return shlex.join(arguments)

"""Slurm jobs that still work at a store: noted with its parts, so that nobody starts over under their hands."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import orjson

from terakoya.atomic_files import committed
from terakoya.errors import UserError

JOBS = "jobs.json"
"""The note's name in the folder of parts."""


def record_jobs(parts: Path, jobs: Sequence[str]) -> None:
    """Notes that `jobs` were submitted for these parts."""
    with committed(parts / JOBS) as stream:
        stream.write(orjson.dumps({"jobs": list(jobs)}))


def check_no_jobs(parts: Path) -> None:
    """UserError while a job that was submitted for these parts waits or runs, and where Slurm cannot be asked."""
    note = parts / JOBS
    if not note.exists():
        return
    jobs = orjson.loads(note.read_bytes())["jobs"]
    names = " and ".join(jobs)
    try:
        # %F is an array's own number, whichever of its tasks a line is about
        answer = subprocess.run(["squeue", "--noheader", "--format=%F"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        problem = "there is no squeue on this machine"
    else:
        queued = set(answer.stdout.split())
        if answer.returncode == 0:
            if not queued & set(jobs):
                note.unlink()
                return
            raise UserError(
                f"{parts.parent}: jobs {names} were submitted for it and are not done yet; wait for them, or cancel "
                f"them: scancel {' '.join(jobs)}"
            )
        problem = f"squeue answers {answer.stderr.strip() or answer.returncode}"
    raise UserError(
        f"{parts.parent}: expected to hear from Slurm whether jobs {names}, submitted for it, are done, but {problem}; "
        f"run this where Slurm is, or remove {note} if they are gone"
    )

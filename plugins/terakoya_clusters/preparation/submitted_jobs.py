"""Records the Slurm jobs that make a store next to its parts, so that no other process interferes while they run."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import orjson

from terakoya.atomic_files import write_atomically
from terakoya.errors import UserError

JOBS = "jobs.json"
"""File name of the record in the folder of parts."""


def record_jobs(parts: Path, jobs: Sequence[str]) -> None:
    """Records that `jobs` were submitted for these parts."""
    with write_atomically(parts / JOBS) as stream:
        stream.write(orjson.dumps({"jobs": list(jobs)}))


def check_no_jobs(parts: Path) -> None:
    """Raises UserError while a job that was submitted for these parts waits or runs, and if Slurm does not answer."""
    record = parts / JOBS
    if not record.exists():
        return
    jobs = orjson.loads(record.read_bytes())["jobs"]
    names = " and ".join(jobs)
    try:
        # %F is the number of the array, for every task of it
        answer = subprocess.run(["squeue", "--noheader", "--format=%F"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        problem = "there is no squeue on this machine"
    else:
        queued = set(answer.stdout.split())
        if answer.returncode == 0:
            if not queued & set(jobs):
                record.unlink()
                return
            raise UserError(
                f"{parts.parent}: jobs {names} were submitted for it and are not done yet; wait for them, or cancel "
                f"them: scancel {' '.join(jobs)}"
            )
        problem = f"squeue answers {answer.stderr.strip() or answer.returncode}"
    raise UserError(
        f"{parts.parent}: expected an answer from Slurm whether jobs {names}, submitted for it, are done, but "
        f"{problem}; run this where Slurm is installed, or remove {record} if the jobs have ended"
    )

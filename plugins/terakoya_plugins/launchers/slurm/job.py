"""A job that Slurm has: what `scontrol` says of it, and how it is asked to save and leave."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from terakoya.components import JobState
from terakoya.errors import Stopped, UserError

ENDS = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
"""Slurm's words for jobs that are over: https://slurm.schedmd.com/squeue.html, "Job State Codes"."""
UNKNOWN = "Invalid job id"
"""What `scontrol` says of jobs that it never had, or has forgotten: minutes after their end, as MinJobAge has it."""


class SlurmJob:
    """The job with this number."""

    def __init__(self, number: str) -> None:
        if not re.fullmatch(r"\d+", number):
            raise UserError(f"launch slurm: expected a job's number or a run's folder, got {number}")
        self.number = number
        self._read = 0

    def state(self) -> JobState:
        """As `scontrol` has it; of a job that it has forgotten, as `sacct` has it.

        Raises:
            UserError: Slurm cannot be asked.
        """
        facts = self._facts()
        if facts is None:
            return self._remembered()
        word, code = facts["JobState"], int(facts.get("ExitCode", "0:0").partition(":")[0])
        told = []
        if word == "PENDING" and facts.get("Reason", "None") != "None":
            told.append(f"waits: {facts['Reason']}")
        if word not in ("PENDING", "COMPLETED") and facts.get("NodeList", "") not in ("", "(null)"):
            told.append(f"on {facts['NodeList']}")
        if facts.get("Restarts", "0") != "0":
            told.append(f"queued again {facts['Restarts']} times" if facts["Restarts"] != "1" else "queued again once")
        if word in ENDS and code:
            told.append("asked to stop, and saved" if code == Stopped.exit_code else f"exit code {code}")
        over = word in ENDS
        return JobState(word, "; ".join(told), over, over and word != "COMPLETED" and code != Stopped.exit_code)

    def _remembered(self) -> JobState:
        asked = [
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            "--format=State,ExitCode",
            f"--jobs={self.number}",
        ]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            lines = []
        else:
            lines = answer.stdout.splitlines() if answer.returncode == 0 else []
        if not lines:
            return JobState("unknown", "Slurm has no such job, or has forgotten it since it ended", done=True)
        word, _, code = lines[-1].partition("|")
        return JobState(word, f"exit code {code.partition(':')[0]}", done=True, failed=not word.startswith("COMPLETED"))

    def stop(self) -> str:
        """Asks its processes to save and leave, and Slurm not to queue it again; one that waits is cancelled.

        Raises:
            UserError: Slurm cannot be asked, or has no such job.
        """
        facts = self._facts()
        if facts is None or facts["JobState"] in ENDS:
            raise UserError(f"launch slurm stop: job {self.number} is over")
        if facts["JobState"] == "PENDING":
            _ask("scancel", self.number)
            return f"job {self.number} was waiting; it is cancelled"
        _ask("scontrol", "update", f"JobId={self.number}", "Requeue=0")
        _ask("scancel", "--signal=TERM", self.number)  # its steps; the script waits for them
        return f"job {self.number} is asked to save and leave, and is not queued again"

    def output(self) -> Iterator[str]:
        """What was added to its output file.

        Raises:
            UserError: Slurm cannot be asked, or the file is not seen here.
        """
        facts = self._facts()
        if facts is None:
            raise UserError(f"launch slurm logs: Slurm has forgotten job {self.number}; see PLAN/{self.number}.out")
        file = Path(facts["StdOut"])
        if not file.exists():
            if facts["JobState"] in ENDS:
                raise UserError(f"launch slurm logs: {file}: no such file on this machine")
            return  # it has not begun
        with file.open("rb") as stream:
            stream.seek(self._read)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from whole.decode(errors="replace").splitlines()

    def fetch(self, out: Path) -> str:
        """UserError: nothing is to be fetched."""
        raise UserError(
            "launch slurm fetch: the run's folder is on a file system you see: terakoya export RUN --out DIR"
        )

    def _facts(self) -> dict[str, str] | None:
        """What `scontrol` says of the job, by name; None of one that it does not have."""
        answer = _ask("scontrol", "show", "job", "--oneliner", self.number, unless=UNKNOWN)
        return None if answer is None else dict(re.findall(r"(?:^|\s)(\w[\w:/]*)=(\S*)", answer))


def submit(script: Path) -> str:
    """Submits `script` and returns the job's number.

    Raises:
        UserError: there is no Slurm, or it refuses.
    """
    answer = _ask("sbatch", "--parsable", str(script))
    assert answer is not None
    return answer.strip().partition(";")[0]  # behind the ; is the cluster


def _ask(*command: str, unless: str | None = None) -> str | None:
    """What a program of Slurm answers; None where it fails with the words `unless`.

    Raises:
        UserError: it is not there, or fails with others.
    """
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"launch slurm: there is no {command[0]} here; run this where jobs are submitted") from None
    if answer.returncode:
        if unless is not None and unless in answer.stderr:
            return None
        raise UserError(f"launch slurm: {command[0]}: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return answer.stdout

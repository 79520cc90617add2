"""A submitted Slurm job: its state from `scontrol`, stop requests, and its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from terakoya.components import JobState
from terakoya.errors import Stopped, UserError
from terakoya_launch.scheduler_programs import run_program
from terakoya_launch.submitted_batch import BatchJob, read_lines

END_STATES = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
"""Slurm's states of jobs that have ended: https://slurm.schedmd.com/squeue.html, "Job State Codes"."""
UNKNOWN = "Invalid job id"
"""The error of `scontrol` for jobs that never existed, or that it has forgotten: MinJobAge, minutes after their end."""


class SlurmJob(BatchJob):
    """The Slurm job with this number."""

    where: ClassVar[str] = "launch slurm"

    def state(self) -> JobState:
        """Returns the state from `scontrol`, or from `sacct` if `scontrol` has forgotten the job."""
        facts = self._facts()
        if facts is None:
            return self._accounting_state()
        status, code = facts["JobState"], int(facts.get("ExitCode", "0:0").partition(":")[0])
        details = []
        if status == "PENDING" and facts.get("Reason", "None") != "None":
            details.append(f"waits: {facts['Reason']}")
        if status not in ("PENDING", "COMPLETED") and facts.get("NodeList", "") not in ("", "(null)"):
            details.append(f"on {facts['NodeList']}")
        if facts.get("Restarts", "0") != "0":
            details.append(f"requeued {facts['Restarts']} times" if facts["Restarts"] != "1" else "requeued once")
        if status in END_STATES and code:
            details.append(_describe_code(code))
        done = status in END_STATES
        return JobState(status, "; ".join(details), done, done and status != "COMPLETED" and code != Stopped.exit_code)

    def _accounting_state(self) -> JobState:
        options = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={self.number}")
        try:
            lines = (run_program(self.where, "sacct", *options) or "").splitlines()
        except UserError:  # not installed, or without a record of jobs
            lines = []
        if not lines:
            return JobState("unknown", "Slurm has no such job, or has forgotten it since its end", done=True)
        status, _, codes = lines[-1].partition("|")
        code = int(codes.partition(":")[0])
        failed = not status.startswith("COMPLETED") and code != Stopped.exit_code
        return JobState(status, _describe_code(code), done=True, failed=failed)

    def stop(self) -> str:
        """Sends its processes a stop request and keeps Slurm from requeueing it; cancels a job that still waits."""
        facts = self._facts()
        if facts is None or facts["JobState"] in END_STATES:
            raise UserError(f"launch slurm stop: job {self.number} has ended")
        if facts["JobState"] == "PENDING":
            run_program(self.where, "scancel", self.number)
            return f"job {self.number} was waiting and is now cancelled"
        run_program(self.where, "scontrol", "update", f"JobId={self.number}", "Requeue=0")
        run_program(self.where, "scancel", "--signal=TERM", self.number)  # goes to its steps; the script waits for them
        return f"sent a stop request to job {self.number}: it saves and exits, and is not requeued"

    def output(self) -> Iterator[str]:
        facts = self._facts()
        if facts is None:
            raise UserError(f"launch slurm logs: Slurm has forgotten job {self.number}; see PLAN/{self.number}.out")
        file = Path(facts["StdOut"])
        if not file.exists():
            if facts["JobState"] in END_STATES:
                raise UserError(f"launch slurm logs: {file}: no such file on this machine")
            return  # the job has not started
        lines, self._read = read_lines(file, self._read)
        yield from lines

    def _facts(self) -> dict[str, str] | None:
        """Returns the fields of `scontrol show job` by name, or None if it does not know the job."""
        answer = run_program(self.where, "scontrol", "show", "job", "--oneliner", self.number, unless=UNKNOWN)
        return None if answer is None else dict(re.findall(r"(?:^|\s)(\w[\w:/]*)=(\S*)", answer))


def _describe_code(code: int) -> str:
    return "stopped on request, checkpoint saved" if code == Stopped.exit_code else f"exit code {code}"

"""A submitted PBS job: its state from `qstat`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from terakoya.components import JobState
from terakoya_clusters.launchers.submitted_batch_job import SubmittedBatchJob
from terakoya_launch.scheduler_programs import run_program

WHERE = "launch pbs"
UNKNOWN = "Unknown Job"
"""The error of `qstat` for jobs that never existed, or whose history is over."""
END_STATES = frozenset("FXM")
"""PBS's letters of jobs that have ended, or moved to another server: qstat(1B), "Job State"."""


class PbsJob(SubmittedBatchJob):
    """The PBS job with this number, and those that continue it."""

    where: ClassVar[str] = WHERE
    waiting: ClassVar[str] = "[QHWT]"

    def find_state(self) -> JobState | None:
        """Returns the letter of its state, its hosts, and why it waits."""
        facts = self._facts()
        status = facts.get("job_state", "F")
        if status in END_STATES:
            return None
        hosts = dict.fromkeys(re.findall(r"(?:^|\+)([^/+]+)/", facts.get("exec_host", "")))
        waits = facts.get("comment", "") if re.search(self.waiting, status) else ""
        return JobState(status, f"on {','.join(hosts)}" if hosts else waits)

    def exit_status(self) -> int | None:
        """Returns the exit status in the server's history; None if it keeps none."""
        code = self._facts().get("Exit_status")
        return None if code is None else int(code)

    def _facts(self) -> dict[str, str]:
        """Returns the fields of `qstat -f` by name; none if PBS does not know the job."""
        answer = run_program(WHERE, "qstat", "-x", "-f", self.number, unless=UNKNOWN) or ""
        whole = answer.replace("\n\t", "")  # long values go on in lines that begin with a tab
        return dict(re.findall(r"^    (\w[\w.]*) = (.*)$", whole, re.M))


def submit(command: Sequence[str]) -> str:
    """Runs a command of qsub and returns the job's number.

    Raises:
        UserError: PBS is not installed, or rejects the script.
    """
    return (run_program(WHERE, *command) or "").strip().partition(".")[0]

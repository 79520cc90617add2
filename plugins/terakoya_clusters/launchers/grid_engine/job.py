"""A submitted Grid Engine job: its state from `qstat` and `qacct`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar
from xml.etree import ElementTree

from terakoya.components import JobState
from terakoya_clusters.launchers.submitted_batch_job import SubmittedBatchJob
from terakoya_launch.scheduler_programs import run_program

WHERE = "launch grid_engine"


class GridEngineJob(SubmittedBatchJob):
    """The Grid Engine job with this number, and those that continue it."""

    where: ClassVar[str] = WHERE
    waiting: ClassVar[str] = "q"

    def find_state(self) -> JobState | None:
        """Returns the letters of its state and its queue, as qstat(1) lists them."""
        answer = run_program(WHERE, "qstat", "-u", "*", "-xml")
        for each in ElementTree.fromstring(answer or "<none/>").iter("job_list"):
            if each.findtext("JB_job_number") == self.number:
                status, queue = each.findtext("state") or "", each.findtext("queue_name")
                if "E" in status:
                    return JobState(status, f"cannot start: qstat -j {self.number} says why")
                return JobState(status, f"on {queue}" if queue else "")
        return None

    def exit_status(self) -> int | None:
        """Returns the exit status of `qacct`, which sites keep for some time; None if it knows no such job."""
        answer = run_program(WHERE, "qacct", "-j", self.number, unless="") or ""
        found = re.findall(r"^exit_status +(\d+)", answer, re.M)  # of each start
        return int(found[-1]) if found else None


def submit(command: Sequence[str]) -> str:
    """Runs a command of qsub and returns the job's number.

    Raises:
        UserError: Grid Engine is not installed, or rejects the script.
    """
    answer = run_program(WHERE, command[0], "-terse", *command[1:]) or ""
    return answer.strip().splitlines()[-1].partition(".")[0]

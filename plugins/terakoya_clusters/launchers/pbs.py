"""Launcher for PBS: a job that saves before its time limit and submits the next one.

`pbs_tmrsh` starts the processes of the other hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from terakoya.components import Job, JobState
from terakoya.config import batch_table
from terakoya_clusters.launchers.batch_jobs import BatchLauncher, job_name
from terakoya_clusters.launchers.submitted_batch_job import SubmittedBatchJob
from terakoya_launch.scheduler_programs import run_program

UNKNOWN = "Unknown Job"
"""The error of `qstat` for jobs that never existed, or whose history is over."""
END_STATES = frozenset("FXM")
"""PBS's letters of jobs that have ended, or moved to another server: qstat(1B), "Job State"."""


class PbsJob(SubmittedBatchJob):
    """The PBS job with this number, and those that continue it."""

    where: ClassVar[str] = "launch pbs"
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
        answer = run_program(self.where, "qstat", "-x", "-f", self.number, unless=UNKNOWN) or ""
        whole = answer.replace("\n\t", "")  # long values go on in lines that begin with a tab
        return dict(re.findall(r"^    (\w[\w.]*) = (.*)$", whole, re.M))


class Pbs(BatchLauncher):
    """Settings of a PBS job."""

    test_settings: ClassVar[Mapping[str, Any]] = {"time": "24:00:00"}
    script: ClassVar[str] = "job.pbs"
    hosts_of_job: ClassVar[str] = "awk '!seen[$1]++ {print $1}' \"$PBS_NODEFILE\""
    number_of_job: ClassVar[str] = "${PBS_JOBID%%.*}"
    qsub_again: ClassVar[str] = "qsub"
    submitted: ClassVar[type[SubmittedBatchJob]] = PbsJob

    cpus: PositiveInt | None = None
    """Cores of each host (`ncpus`); null leaves them to the queue."""
    gpus: NonNegativeInt = 0
    """GPUs of each host (`ngpus`); 0 where the queue gives them."""
    memory: str | None = None
    """Memory of each host (`mem`): 64gb."""
    start: str = "pbs_tmrsh"
    """The command to which a host and the command to run there are appended; ssh where hosts let you in."""

    def directives(self, job: Job, folder: Path) -> list[str]:
        asked = {"ncpus": self.cpus, "ngpus": self.gpus or None, "mem": self.memory}
        each = "".join(f":{name}={value}" for name, value in asked.items() if value is not None)
        if batch_table.has_host_names(job.batch_size):
            select = "+".join(f"1{each}:host={host}" for host in job.batch_size)
        else:
            select = f"{len(job.batch_size)}{each}"
        lines = [f"-N {job_name(job)}", "-S /bin/bash", f"-l select={select}", f"-l walltime={self.time}"]
        lines += ["-l place=scatter"] if len(job.batch_size) > 1 else []
        # -r: PBS runs it again after the loss of a host
        return [
            f"#PBS {line}"
            for line in (*lines, *self._ends(), "-r y", "-j oe", f"-o {folder}/scheduler.out", *self.qsub)
        ]

    def qsub_command(self, folder: Path) -> list[str]:
        after = [] if self.after is None else ["-W", f"depend=afterok:{self.after.replace(',', ':')}"]
        return ["qsub", *after, str(folder / self.script)]

"""Launcher for Grid Engine (SGE, UGE, AGE): a job that saves before its time limit and submits the next one.

`qrsh -inherit` starts the processes of the other hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self
from xml.etree import ElementTree

from pydantic import PositiveInt, model_validator

from terakoya.components import Job, JobState, LaunchPlan
from terakoya.config import batch_table
from terakoya.errors import UserError
from terakoya_clusters.launchers.batch_jobs import BatchLauncher, job_name
from terakoya_clusters.launchers.submitted_batch_job import SubmittedBatchJob
from terakoya_launch.scheduler_programs import run_program


class GridEngineJob(SubmittedBatchJob):
    """The Grid Engine job with this number, and those that continue it."""

    where: ClassVar[str] = "launch grid_engine"
    waiting: ClassVar[str] = "q"

    def find_state(self) -> JobState | None:
        """Returns the letters of its state and its queue, as qstat(1) lists them."""
        answer = run_program(self.where, "qstat", "-u", "*", "-xml")
        for each in ElementTree.fromstring(answer or "<none/>").iter("job_list"):
            if each.findtext("JB_job_number") == self.number:
                status, queue = each.findtext("state") or "", each.findtext("queue_name")
                if "E" in status:
                    return JobState(status, f"cannot start: qstat -j {self.number} says why")
                return JobState(status, f"on {queue}" if queue else "")
        return None

    def exit_status(self) -> int | None:
        """Returns the exit status of `qacct`, which sites keep for some time; None if it knows no such job."""
        answer = run_program(self.where, "qacct", "-j", self.number, unless="") or ""
        found = re.findall(r"^exit_status +(\d+)", answer, re.M)  # of each start
        return int(found[-1]) if found else None


class GridEngine(BatchLauncher):
    """Settings of a Grid Engine job."""

    test_settings: ClassVar[Mapping[str, Any]] = {"time": "24:00:00", "resources": ["rt_F={nodes}"]}
    script: ClassVar[str] = "job.sge"
    hosts_of_job: ClassVar[str] = 'if [ -n "${PE_HOSTFILE:-}" ]; then awk \'!seen[$1]++ {print $1}\' "$PE_HOSTFILE"; ' \
        "else hostname; fi"  # fmt: skip
    number_of_job: ClassVar[str] = "$JOB_ID"
    qsub_again: ClassVar[str] = "qsub -terse"
    submitted: ClassVar[type[SubmittedBatchJob]] = GridEngineJob

    pe: str | None = None
    """The parallel environment (`-pe`), which decides how slots fall on hosts; null where `resources` ask for hosts."""
    slots: PositiveInt = 1
    """Slots of each host in the parallel environment. Unit: slots."""
    resources: tuple[str, ...] = ()
    """Resources (`-l`), in which {nodes} becomes the number of hosts: rt_F={nodes}, h_vmem=60G."""
    start: str = "qrsh -inherit -nostdin"

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.pe is None and self.slots > 1:
            raise ValueError("slots: needs pe, the parallel environment whose slots they are")
        return self

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        if len(job.batch_size) > 1 and self.pe is None and not any("{nodes}" in each for each in self.resources):
            raise UserError(
                f"launch grid_engine: batch_size is for {len(job.batch_size)} hosts: give pe, the parallel environment "
                "that gives whole hosts (`qconf -spl` lists them), or a resource with {nodes}, such as rt_F={nodes}"
            )
        return super().plan(job, folder)

    def directives(self, job: Job, folder: Path) -> list[str]:
        nodes = len(job.batch_size)
        lines = [f"-N {job_name(job)}", "-S /bin/bash", f"-l h_rt={self.time}"]
        lines += [f"-pe {self.pe} {nodes * self.slots}"] if self.pe is not None else []
        lines += [f"-l {each.replace('{nodes}', str(nodes))}" for each in self.resources]
        lines += self._ends()
        if batch_table.has_host_names(job.batch_size):
            lines.append(f"-l hostname={'|'.join(job.batch_size)}")
        # -notify: SIGUSR2 before SIGKILL; -r y: runs again after the loss of a host
        return [f"#$ {line}" for line in (*lines, "-notify", "-r y", "-j y", f"-o {folder}/scheduler.out", *self.qsub)]

    def qsub_command(self, folder: Path) -> list[str]:
        after = [] if self.after is None else ["-hold_jid", self.after]
        return ["qsub", *after, str(folder / self.script)]

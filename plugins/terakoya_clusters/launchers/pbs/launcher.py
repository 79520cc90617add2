"""Launcher for PBS: a job that saves before its time limit and submits the next one.

`pbs_tmrsh` starts the processes of the other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from terakoya.components import Job, LaunchPlan, SubmittedJob
from terakoya.config import batch_table
from terakoya_clusters.launchers.batch_jobs import BatchLauncher, job_name
from terakoya_clusters.launchers.pbs import job as pbs_job
from terakoya_launch.submitted import SubmittedJobRecord


class Pbs(BatchLauncher):
    """Settings of a PBS job."""

    main_setting: ClassVar[str | None] = "queue"
    test_settings: ClassVar[Mapping[str, Any]] = {"time": "24:00:00"}
    script: ClassVar[str] = "job.pbs"
    hosts_of_job: ClassVar[str] = "awk '!seen[$1]++ {print $1}' \"$PBS_NODEFILE\""
    number_of_job: ClassVar[str] = "${PBS_JOBID%%.*}"
    qsub_again: ClassVar[str] = "qsub"

    cpus: PositiveInt | None = None
    """Cores of each host (`ncpus`); null leaves them to the queue."""
    gpus: NonNegativeInt = 0
    """GPUs of each host (`ngpus`); 0 where the queue gives them."""
    memory: str | None = None
    """Memory of each host (`mem`): 64gb."""
    queue: str | None = None
    """The queue (`-q`); null leaves it to the scheduler."""
    project: str | None = None
    """The project that pays for the job (`-P`). Centres with another option for it, such as -W group_list, take it in
    `qsub`."""
    start: str = "pbs_tmrsh"
    """The command to which a host and the command to run there are appended; ssh where hosts let you in."""

    def directives(self, job: Job, folder: Path) -> list[str]:
        """Returns lines that begin with `#PBS`."""
        asked = {"ncpus": self.cpus, "ngpus": self.gpus or None, "mem": self.memory}
        each = "".join(f":{name}={value}" for name, value in asked.items() if value is not None)
        if batch_table.has_host_names(job.batch_size):
            select = "+".join(f"1{each}:host={host}" for host in job.batch_size)
        else:
            select = f"{len(job.batch_size)}{each}"
        lines = [f"-N {job_name(job)}", "-S /bin/bash", f"-l select={select}", f"-l walltime={self.time}"]
        lines += ["-l place=scatter"] if len(job.batch_size) > 1 else []
        lines += [f"-q {self.queue}"] if self.queue is not None else []
        lines += [f"-P {self.project}"] if self.project is not None else []
        # -r: PBS runs it again after the loss of a host
        return [f"#PBS {line}" for line in (*lines, "-r y", "-j oe", f"-o {folder}/scheduler.out", *self.qsub)]

    def qsub_command(self, folder: Path) -> list[str]:
        """Returns the command that submits the script."""
        after = [] if self.after is None else ["-W", f"depend=afterok:{self.after.replace(',', ':')}"]
        return ["qsub", *after, str(folder / self.script)]

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Submits the script and records the job's number; returns 0.

        Raises:
            UserError: PBS is not installed, or rejects the script.
        """
        number = pbs_job.submit(self.qsub_command(folder))
        SubmittedJobRecord("pbs", number, job.out).write(folder)
        return 0

    @classmethod
    def find_job(cls, name: str, folder: Path | None = None) -> SubmittedJob:
        """Returns the job with this number, submitted from the plan in `folder`, or the last that continues it."""
        return pbs_job.PbsJob(name, folder)

    def _start(self) -> str:
        return self.start

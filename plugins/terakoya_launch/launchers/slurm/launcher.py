"""Launcher for Slurm: one batch script, whose job saves before its time limit and requeues itself.

srun starts every process; ranks come from SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, field_validator, model_validator

from terakoya.components import Job, Launcher, LaunchPlan, SubmittedJob
from terakoya.config import batch_table
from terakoya.errors import UserError
from terakoya_launch.job_checks import check_in_job
from terakoya_launch.launchers.slurm.job import SlurmJob
from terakoya_launch.scheduler_programs import run_program
from terakoya_launch.scripts import FINAL_EXIT_CODES, define_newest, files_of, quote, script_head
from terakoya_launch.submitted import SubmittedJobRecord
from terakoya_launch.submitted_batch import JobNumbers

SCRIPT = Template("""\
#!/bin/bash
$directives
# Starts $processes process$es on each of $nodes node$s; saves before the time limit and requeues itself.
$head
MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | sed -n 1p)  # head would close the pipe early
MASTER_PORT=$$((20000 + SLURM_JOB_ID % 20000))  # jobs on the same node get different ports
export MASTER_ADDR MASTER_PORT HF_HUB_OFFLINE=1
export TERAKOYA_LASTING_CODE_FILE=$folder/$$SLURM_JOB_ID.lasting  # 2 or 3 of any process; srun returns the highest code
rm -f "$$TERAKOYA_LASTING_CODE_FILE"
export OMP_NUM_THREADS="$${SLURM_CPUS_PER_TASK:-1}"
[ -z "$${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$$SLURM_CPUS_PER_TASK"  # not inherited since 22.05
$environment
$newest
before=$$(newest)
asked=no
ask() {  # all processes save and exit; srun would kill them if it received SIGTERM itself
  asked=yes
  scancel --signal=TERM "$$SLURM_JOB_ID" || true
}
trap ask TERM USR1  # Slurm's warning before the time limit
srun $srun$inside$command & step=$$!
wait $$step || true
while kill -0 $$step 2> /dev/null; do wait $$step || true; done  # a signal interrupts wait
code=0
wait $$step || code=$$?
[ $$code = 0 ] || [ ! -s "$$TERAKOYA_LASTING_CODE_FILE" ] || code=$$(cat "$$TERAKOYA_LASTING_CODE_FILE")

facts=$$(scontrol show job --oneliner "$$SLURM_JOB_ID" || true)
case $$facts in
  *" PreemptTime=2"*) asked=preempted ;;  # Slurm has sent SIGTERM to the processes itself
  "" | *" JobState=RUNNING "*) ;;
  *) exit $$code ;;  # cancelled, or already requeued by Slurm
esac
again() {
  scontrol requeue "$$SLURM_JOB_ID" || true
  exit $$code
}
[ "$$code,$$asked" != 75,yes ] || [ "$$(newest)" != "$$before" ] || code=143  # nothing was trained since the start
case $$code,$$asked in
  75,*) again ;;  # stopped on request, checkpoint saved
  143,preempted) again ;;  # stopped before there was anything to save
  143,yes) ;;  # the same at the time limit: a crash, so that a slow start does not requeue for ever
  *) case $$code in $settled) exit $$code ;; esac ;;
esac
crashes=$$(($$(cat $folder/$$SLURM_JOB_ID.crashes 2> /dev/null || echo 0) + 1))
if [ $$crashes -le $max_restarts ]; then
  echo "exit code $$code; requeued ($$crashes of $max_restarts), resumes from the last checkpoint" >&2
  echo $$crashes > $folder/$$SLURM_JOB_ID.crashes
  again
fi
exit $$code
""")

SRUN_WAIT_SECONDS = 600
"""How long srun waits for the others after one process has exited: rank 0 may still be sending to its trackers."""
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?")


class Slurm(Launcher):
    """Settings of a Slurm job."""

    detached: ClassVar[bool] = True
    main_setting: ClassVar[str | None] = "partition"
    test_settings: ClassVar[Mapping[str, Any]] = {"time": "24:00:00"}

    time: str
    """The time limit of one start, as for sbatch: 24:00:00, 3-00. At the limit the job requeues itself."""
    processes: PositiveInt = 1
    """Processes on each node: one for each GPU. Unit: processes."""
    cpus_per_process: PositiveInt | None = None
    """Cores of each process (`--cpus-per-task`)."""
    gpus: NonNegativeInt = 0
    """GPUs of each node (`--gpus-per-node`); 0 if the cluster uses `gres`."""
    account: str | None = None
    """The account that pays for the job (`--account`); null leaves it to Slurm."""
    partition: str | None = None
    """The partition (`--partition`); null leaves it to Slurm."""
    qos: str | None = None
    """The quality of service (`--qos`); null leaves it to Slurm."""
    gres: str | None = None
    """Generic resources of each node (`--gres`), for example gpu:a100:4."""
    memory: str | None = None
    """Memory of each node (`--mem`): 64G."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as --constraint=a100 and --mail-type=FAIL."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run first: modules, an environment."""
    inside: str = ""
    """A command to put before that of each process: numactl --localalloc, or a container's command."""
    container: str | None = None
    """The container image of the processes, with terakoya installed: a file for apptainer, a name for pyxis."""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """`apptainer exec` before the command, or `srun --container-image` of Slurm's plugin pyxis."""
    mounts: tuple[str, ...] = ()
    """Further folders of the nodes to mount in the container. The current one, the run's, the plan's, and those of the
    parameters, plugins and token stores are mounted anyway."""
    interface: str | None = None
    """The network interface between the processes, such as ib0. Default: NCCL and gloo choose."""
    offline: bool = False
    """Whether the nodes have no internet access: trackers then write only to files. The Hub is never used."""
    after: JobNumbers | None = None
    """Numbers of jobs that must succeed first, such as the job that joins a store: 120, or 120,121."""
    signal_seconds: PositiveInt = 300
    """How long before its time limit the job saves: longer than a step and a checkpoint take. Unit: seconds."""
    max_restarts: NonNegativeInt = 3
    """How often a crashed job is requeued; Slurm itself requeues a job that lost its node."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.container is None and self.mounts:
            raise ValueError("mounts: needs container; give container, or leave mounts out")
        if self.container is not None and self.inside:
            raise ValueError("inside: conflicts with container, which puts its own command there; give one of the two")
        return self

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str) -> str:
        if TIME.fullmatch(value):
            return value
        raise ValueError(f'expected a time in the format of sbatch, such as 24:00:00 or 3-00:00:00, got "{value}"')

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        if 0 < _seconds(self.time) <= self.signal_seconds:
            raise UserError(
                f"launch: signal_seconds: expected less than the time limit {self.time}, got {self.signal_seconds} s"
            )
        if re.search(r"[\s%\\]", str(folder)):
            raise UserError(
                f"launch slurm: {folder}: sbatch accepts no folder with spaces, % or \\; choose another with --folder"
            )
        nodes = len(job.batch_size)
        options = {
            "job-name": job.name,
            "nodes": nodes,
            "nodelist": ",".join(job.batch_size) if batch_table.has_host_names(job.batch_size) else None,
            "ntasks-per-node": self.processes,
            "cpus-per-task": self.cpus_per_process,
            "gpus-per-node": self.gpus or None,
            "gres": self.gres,
            "mem": self.memory,
            "time": self.time,
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
            "dependency": None if self.after is None else f"afterok:{self.after.replace(',', ':')}",
            "kill-on-invalid-dep": None if self.after is None else "yes",
            "signal": f"B:USR1@{self.signal_seconds}",
            "output": f"{folder}/%j.out",
        }
        lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
        script = SCRIPT.substitute(
            directives="\n".join(
                f"#SBATCH {line}" for line in (*lines, "--requeue", "--open-mode=append", *self.sbatch)
            ),
            processes=self.processes,
            es="es" if self.processes > 1 else "",
            nodes=nodes,
            s="s" if nodes > 1 else "",
            head=script_head(job, self.setup),
            environment=self._environment(job),
            srun="".join(f"{word} " for word in self._srun(job, folder)),
            inside=self._inside(job, folder),
            command=quote("python", "-m", job.module, *job.arguments),
            settled=FINAL_EXIT_CODES,
            max_restarts=self.max_restarts,
            folder=quote(str(folder)),
            newest=define_newest(job),
        )
        rows = ", ".join(map(str, job.batch_size.values()))
        notes = [
            f"rows a step on each node: {rows}; all nodes must see {job.folder} and {job.place}",
            f"the job's output is appended to {folder}/JOB.out; --after JOB waits for jobs that prepare its data "
            "(prepare --executor slurm)",
        ]
        if not self.gpus and self.gres is None and not any("gpu" in option for option in self.sbatch):
            notes.append("the job asks for no GPU; where nodes have some: --gpus N --processes N")
        elif self.cpus_per_process is None:
            notes.append("Slurm gives a process one core unless told otherwise: --cpus-per-process N")
        return LaunchPlan({"job.sbatch": script}, [quote("sbatch", str(folder / "job.sbatch"))], notes)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        answer = run_program(SlurmJob.where, "sbatch", "--parsable", str(folder / "job.sbatch")) or ""
        number = answer.strip().partition(";")[0]  # the cluster's name follows the ;
        SubmittedJobRecord("slurm", number, job.out).write(folder)
        return 0

    def check(self, job: Job, folder: Path) -> None:
        check_in_job(self, job, folder)

    @classmethod
    def find_job(cls, name: str, folder: Path | None = None) -> SubmittedJob:
        return SlurmJob(name)

    def _environment(self, job: Job) -> str:
        """Returns lines of bash that set further variables, and make the folder that a container mounts."""
        lines = []
        if self.container is not None and job.kept_in is not None:
            lines.append(f"mkdir -p {quote(str(job.run.parent))}\n")
        if self.interface is not None:
            lines.append(f"export NCCL_SOCKET_IFNAME={self.interface} GLOO_SOCKET_IFNAME={self.interface}\n")
        if self.offline:
            lines.append("export WANDB_MODE=offline\n")
        return "".join(lines)

    def _srun(self, job: Job, folder: Path) -> list[str]:
        options = [f"--wait={SRUN_WAIT_SECONDS}"]
        if self.container is not None and self.container_runtime == "pyxis":
            mounts = ",".join(f"{mounted}:{mounted}" for mounted in self._mounts(job, folder))
            options += [f"--container-image={self.container}", f"--container-mounts={mounts}"]
            options += [f"--container-workdir={job.folder}"]
        return [quote(option) for option in options]

    def _inside(self, job: Job, folder: Path) -> str:
        """Returns the command before that of each process, with a trailing space."""
        if self.container is None or self.container_runtime == "pyxis":
            return f"{self.inside} " if self.inside else ""
        command = ["apptainer", "exec", *(["--nv"] if self.gpus or self.gres else [])]
        for mounted in self._mounts(job, folder):
            command += ["--bind", mounted]
        return quote(*command, "--pwd", str(job.folder), self.container) + " "

    def _mounts(self, job: Job, folder: Path) -> list[str]:
        """Returns the folders of the node to mount in the container, without those that lie in others. Of a path with
        symbolic links that is also the folder to which it leads."""
        files = [file.parent for file in files_of(job)]
        mounted: list[Path] = []
        for path in (job.folder, job.run.parent, folder, *files, *job.data_folders):
            for each in (path, path.resolve()):
                if not any(each.is_relative_to(other) for other in mounted):
                    mounted.append(each)
        return list(dict.fromkeys([*map(str, mounted), *self.mounts]))


def _seconds(time: str) -> int:
    """Returns a time limit in sbatch's format in seconds: MINUTES[:SECONDS], HOURS:MINUTES:SECONDS, or DAYS- and hours
    with minutes and seconds after them."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds

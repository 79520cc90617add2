"""Launcher for Slurm: one batch script, whose job saves before its time is over and queues itself again.

srun starts every process itself; ranks come from SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, ClassVar, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, field_validator, model_validator

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan, SubmittedJob, batch_table
from terakoya.errors import UserError
from terakoya.toolkit.launchers.scripts import SETTLED, head, words
from terakoya.toolkit.launchers.submitted import SubmittedJobRecord
from terakoya_plugins.launchers.slurm import job as slurm_job

SCRIPT = Template("""\
#!/bin/bash
$directives
# Starts $processes process$es on each of $nodes node$s; out of time it saves, and queues itself again.
$head
MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | sed -n 1p)  # head would end it early
MASTER_PORT=$$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node get different ones
export MASTER_ADDR MASTER_PORT HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="$${SLURM_CPUS_PER_TASK:-1}"
[ -z "$${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$$SLURM_CPUS_PER_TASK"  # its own since 22.05
$environment
asked=no
ask() {  # every process saves and leaves; srun itself, sent a SIGTERM, would kill them
  asked=yes
  scancel --signal=TERM "$$SLURM_JOB_ID" || true
}
trap ask TERM USR1  # Slurm's word that time runs out
srun $srun$inside$command & step=$$!
wait $$step || true
while kill -0 $$step 2> /dev/null; do wait $$step || true; done  # a signal ends a wait early
code=0
wait $$step || code=$$?

facts=$$(scontrol show job --oneliner "$$SLURM_JOB_ID" || true)
case $$facts in
  *" PreemptTime=2"*) asked=preempted ;;  # Slurm has told the processes without us
  "" | *" JobState=RUNNING "*) ;;
  *) exit $$code ;;  # cancelled; or Slurm has queued it again itself
esac
again() {
  scontrol requeue "$$SLURM_JOB_ID" || true
  exit $$code
}
case $$code,$$asked in
  75,*) again ;;  # saved on somebody's wish
  143,preempted) again ;;  # before there was anything to save
  143,yes) ;;  # the same, out of time: a start that takes longer than that would never end
  *) case $$code in $settled) exit $$code ;; esac ;;
esac
crashes=$$(($$(cat $folder/$$SLURM_JOB_ID.crashes 2> /dev/null || echo 0) + 1))
if [ $$crashes -le $max_restarts ]; then
  echo "ended with $$code; queued again ($$crashes of $max_restarts), to go on from the last checkpoint" >&2
  echo $$crashes > $folder/$$SLURM_JOB_ID.crashes
  again
fi
exit $$code
""")

LEAVING_SECONDS = 600
"""How long srun waits for the others once a process has left: rank 0 may still be telling its trackers."""
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?")


class Slurm(Launcher):
    """Settings of a job."""

    detached: ClassVar[bool] = True
    test_settings: ClassVar[Mapping[str, Any]] = {"time": "24:00:00"}

    time: str
    """The most it may take at a stretch, as sbatch has it: 24:00:00, 3-00. After it the job queues itself again."""
    processes: PositiveInt = 1
    """Processes on each node: one for each GPU."""
    cpus_per_process: PositiveInt | None = None
    """Cores of each process (`--cpus-per-task`)."""
    gpus: NonNegativeInt = 0
    """GPUs of each node (`--gpus-per-node`); leave it 0 where the cluster wants `gres`."""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    gres: str | None = None
    """Such as gpu:a100:4."""
    memory: str | None = None
    """Of each node (`--mem`): 64G."""
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, such as --constraint=a100 and --mail-type=FAIL."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run first: modules, an environment."""
    inside: str = ""
    """What stands before the command in each process: numactl --localalloc, or a container's own command."""
    container: str | None = None
    """An image that the processes run in: a file for apptainer, a name for pyxis. It has terakoya installed."""
    container_runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """`apptainer exec` before the command, or `srun --container-image`, which the plugin pyxis brings."""
    mounts: tuple[str, ...] = ()
    """Folders of the nodes that the container sees, beside the current one and the run's: those of the token stores."""
    interface: str | None = None
    """The network interface that processes talk over, such as ib0; chosen by NCCL and gloo where not given."""
    offline: bool = False
    """The nodes reach no internet: trackers write to files alone. Nothing is ever asked of the Hub."""
    after: str | None = None
    """Numbers of jobs that must have ended well before, such as the one that joins a store: 120, or 120,121."""
    signal_seconds: PositiveInt = 300
    """How long before the end of its time the job saves: longer than a step and a checkpoint take."""
    max_restarts: NonNegativeInt = 3
    """How often a job that crashed is queued again; one that lost its node Slurm queues again by itself."""

    @field_validator("after")
    @classmethod
    def _are_jobs(cls, value: str | None) -> str | None:
        if value is None or re.fullmatch(r"\d+(,\d+)*", value):
            return value
        raise ValueError(f'expected numbers of jobs, such as 120 or 120,121, got "{value}"')

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.container is None and self.mounts:
            raise ValueError("mounts: are for a container; give container, or leave them out")
        if self.container is not None and self.inside:
            raise ValueError("inside: stands where container puts its own command; give one of the two")
        return self

    @field_validator("time")
    @classmethod
    def _is_time(cls, value: str) -> str:
        if TIME.fullmatch(value):
            return value
        raise ValueError(f'expected a time as sbatch has it, such as 24:00:00 or 3-00:00:00, got "{value}"')

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """One script, `job.sbatch`; what the job prints is added to `JOB.out` beside it.

        Raises:
            UserError: the folder's name cannot stand in a directive.
        """
        if re.search(r"[\s%\\]", str(folder)):
            raise UserError(f"launch slurm: {folder}: sbatch takes no folder with spaces, % or \\; choose --folder")
        nodes = len(job.batch_size)
        options = {
            "job-name": job.name,
            "nodes": nodes,
            "nodelist": ",".join(job.batch_size) if batch_table.by_name(job.batch_size) else None,
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
            head=head(job, self.setup),
            environment=self._environment(),
            srun="".join(f"{word} " for word in self._srun(job)),
            inside=self._inside(job),
            command=words("python", "-m", "terakoya", *job.arguments),
            settled=SETTLED,
            max_restarts=self.max_restarts,
            folder=words(str(folder)),
        )
        rows = ", ".join(map(str, job.batch_size.values()))
        notes = [
            f"rows a step on each node: {rows}; {job.folder} and {job.run} are on a file system all nodes see",
            f"what the job prints is added to {folder}/JOB.out; its data, prepared by jobs too, is waited for with "
            "--after JOB (prepare --executor slurm)",
        ]
        return LaunchPlan({"job.sbatch": script}, [words("sbatch", str(folder / "job.sbatch"))], notes)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Submits the script and leaves a note of the job's number; 0.

        Raises:
            UserError: there is no Slurm here, or it refuses.
        """
        SubmittedJobRecord("slurm", slurm_job.submit(folder / "job.sbatch"), str(job.run)).write(folder)
        return 0

    @classmethod
    def find_job(cls, name: str) -> SubmittedJob:
        """The job with this number."""
        return slurm_job.SlurmJob(name)

    def _environment(self) -> str:
        """Lines that set further variables."""
        lines = []
        if self.interface is not None:
            lines.append(f"export NCCL_SOCKET_IFNAME={self.interface} GLOO_SOCKET_IFNAME={self.interface}\n")
        if self.offline:
            lines.append("export WANDB_MODE=offline\n")
        return "".join(lines)

    def _srun(self, job: Job) -> list[str]:
        """The options of srun, quoted."""
        options = [f"--wait={LEAVING_SECONDS}"]
        if self.container is not None and self.container_runtime == "pyxis":
            mounts = ",".join(f"{folder}:{folder}" for folder in self._mounts(job))
            options += [f"--container-image={self.container}", f"--container-mounts={mounts}"]
            options += [f"--container-workdir={job.folder}"]
        return [words(option) for option in options]

    def _inside(self, job: Job) -> str:
        """What stands before the command, a space behind it."""
        if self.container is None or self.container_runtime == "pyxis":
            return f"{self.inside} " if self.inside else ""
        command = ["apptainer", "exec", *(["--nv"] if self.gpus or self.gres else [])]
        for folder in self._mounts(job):
            command += ["--bind", folder]
        return words(*command, "--pwd", str(job.folder), self.container) + " "

    def _mounts(self, job: Job) -> list[str]:
        """What the container sees of the node, each once."""
        return list(dict.fromkeys([str(job.folder), str(job.run.parent), *self.mounts]))


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `slurm`."""
    return {"slurm": Slurm}

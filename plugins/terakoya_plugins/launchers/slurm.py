"""Launcher for Slurm: one batch script, whose job saves before its time is over and queues itself again.

srun starts every process itself; ranks come from SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt, field_validator

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan
from terakoya.errors import UserError
from terakoya.launch_scripts import SETTLED, head, words

SCRIPT = Template("""\
#!/bin/bash
$directives
# Starts $processes process$es on each of $nodes node$s; out of time it saves, and queues itself again.
$head
MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node get different ones
export MASTER_ADDR MASTER_PORT HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="$${SLURM_CPUS_PER_TASK:-1}"

srun --wait=$leaving_seconds $inside$command & step=$$!
trap 'kill -TERM $$step' TERM USR1  # Slurm's word that time runs out: every process saves and leaves
code=0
wait $$step || code=$$?
while kill -0 $$step 2> /dev/null; do code=0; wait $$step || code=$$?; done  # a signal ends a wait early

if [ $$code -eq 75 ]; then  # saved on somebody's wish
  scontrol requeue "$$SLURM_JOB_ID" || true  # a job that was preempted is in the queue already
  exit $$code
fi
case $$code in
  $settled) exit $$code ;;
esac
if [ "$${SLURM_RESTART_COUNT:-0}" -lt $max_restarts ]; then
  echo "ended with $$code; queued again, to go on from the last checkpoint" >&2
  scontrol requeue "$$SLURM_JOB_ID"
fi
exit $$code
""")

LEAVING_SECONDS = 600
"""How long srun waits for the others once a process has left: rank 0 may still be telling its trackers."""
TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d(:\d\d)?)?")


class Slurm(Launcher):
    """Settings of a job."""

    trial: ClassVar[Mapping[str, Any]] = {"time": "24:00:00"}

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
    """What stands before the command on each node: apptainer exec --nv image.sif."""
    signal_seconds: PositiveInt = 300
    """How long before the end of its time the job saves: longer than a step and a checkpoint take."""
    max_restarts: NonNegativeInt = 3
    """How often a job that crashed is queued again; one that lost its node Slurm queues again by itself."""

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
            "ntasks-per-node": self.processes,
            "cpus-per-task": self.cpus_per_process,
            "gpus-per-node": self.gpus or None,
            "gres": self.gres,
            "mem": self.memory,
            "time": self.time,
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
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
            leaving_seconds=LEAVING_SECONDS,
            inside=f"{self.inside} " if self.inside else "",
            command=words("python", "-m", "terakoya", *job.arguments),
            settled=SETTLED,
            max_restarts=self.max_restarts,
        )
        rows = ", ".join(map(str, job.batch_size.values()))
        notes = [f"rows a step on each node: {rows}; {job.folder} and {job.run} are on a file system all nodes see"]
        return LaunchPlan({"job.sbatch": script}, [words("sbatch", str(folder / "job.sbatch"))], notes)


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `slurm`."""
    return {"slurm": Slurm}

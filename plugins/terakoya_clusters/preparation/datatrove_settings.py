"""Settings of datatrove's executors: their own arguments, except those that terakoya sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from terakoya.errors import UserError
from terakoya.json_settings import explain

Executor = Literal["local", "slurm", "ray"]
Workers = Literal[-1] | PositiveInt


class ExecutorSettings(BaseModel):
    """Settings of every executor."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    tasks: PositiveInt | None = None
    """Number of tasks that share the blocks; never more than there are blocks to encode."""
    workers: Workers | None = None
    """Number of tasks that run at the same time; -1 is all of them."""
    logging_dir: str | None = None
    """The folder of datatrove's logs and statistics; null is `OUT.datatrove` next to the store."""
    randomize_start_duration: NonNegativeInt = 0
    """The longest time that a task waits before it begins. Unit: seconds."""


class LocalSettings(ExecutorSettings):
    """`LocalPipelineExecutor`: processes on this machine."""


class SlurmSettings(ExecutorSettings):
    """`SlurmPipelineExecutor`: an array of jobs, and one job that joins their parts."""

    tasks: PositiveInt
    """Number of tasks that share the blocks; never more than there are blocks to encode."""
    time: str
    """The time limit of a job, as for sbatch: 24:00:00."""
    partition: str
    """The partition of the jobs."""
    cpus_per_task: PositiveInt = 1
    """Cores of each task."""
    mem_per_cpu_gb: PositiveInt = 2
    """Memory of each core. Unit: GB."""
    tasks_per_job: PositiveInt = 1
    """Number of tasks that each job runs."""
    job_name: str = "terakoya-prepare"
    """The name of the jobs."""
    qos: str | None = "normal"
    """The quality of service of the jobs; null leaves it to Slurm."""
    env_command: str | None = None
    """A command that prepares the environment of a job, before the tasks."""
    condaenv: str | None = None
    """The conda environment that a job activates."""
    venv_path: str | None = None
    """The script that activates a job's virtual environment."""
    sbatch_args: dict[str, str | int | bool] = {}
    """Further options of sbatch, by name."""
    srun_args: dict[str, str | int] = {}
    """Further options of srun, by name."""
    with_srun: bool = True
    """Whether a job starts its tasks with srun."""
    max_array_size: PositiveInt = 1001
    """The largest array of jobs that the cluster accepts; more tasks become several arrays."""
    slurm_logs_folder: str | None = None
    """The folder of the jobs' output; null lets datatrove choose."""
    requeue: bool = True
    """Whether Slurm may requeue a job that failed or lost its node."""
    requeue_signals: tuple[str, ...] | None = ("SIGUSR1",)
    """The signals at which a job requeues itself."""
    mail_type: str = "ALL"
    """The events of which Slurm sends mail, if `mail_user` is set."""
    mail_user: str | None = None
    """The address to which Slurm sends mail; null sends none."""


class RaySettings(ExecutorSettings):
    """`RayPipelineExecutor`: actors of the Ray cluster at `RAY_ADDRESS`, or of a new one on this machine."""

    cpus_per_task: PositiveInt = 1
    """Cores of each task."""
    mem_per_cpu_gb: NonNegativeFloat = 2
    """Memory of each core. Unit: GB."""
    tasks_per_job: PositiveInt = 1
    """Number of tasks that each actor runs."""
    ray_remote_kwargs: dict[str, Any] | None = None
    """Further options of `ray.remote`, by name."""
    time: PositiveFloat | None = None
    """The time after which a task is cancelled; null is no limit. Unit: seconds."""


EXECUTORS: dict[Executor, type[ExecutorSettings]] = {"local": LocalSettings, "slurm": SlurmSettings, "ray": RaySettings}
_OPTIONS_OF_SBATCH = (
    "account",
    "chdir",
    "constraint",
    "exclude",
    "exclusive",
    "gres",
    "mem",
    "nice",
    "nodelist",
    "reservation",
)
"""Common options of sbatch, which are settings of `sbatch_args`."""


def executor_settings(executor: Executor, values: Mapping[str, Any]) -> ExecutorSettings:
    """Returns `values` as settings of `executor`. Raises UserError for unknown keys, with the nearest, and wrong
    values."""
    model = EXECUTORS[executor]
    unknown = [name for name in values if name not in model.model_fields]
    if executor == "slurm":
        for name in unknown:
            if name.replace("-", "_") in _OPTIONS_OF_SBATCH:
                raise UserError(f"--set {name}: this is an option of sbatch: give it as --set sbatch_args.{name}=VALUE")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = "\n  ".join(explain(error, model))
        raise UserError(f"--executor {executor}: settings (--set KEY=VALUE):\n  {problems}") from None

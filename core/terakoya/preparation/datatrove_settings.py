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
    """Settings of every executor.

    Attributes:
        tasks: number of tasks that share the blocks; never more than there are blocks to encode.
        workers: number of tasks that run at the same time; -1 is all of them.
        logging_dir: folder for datatrove's logs and statistics; by default `OUT.datatrove` next to the store.
        randomize_start_duration: each task waits up to this number of seconds before it begins.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    tasks: PositiveInt | None = None
    workers: Workers | None = None
    logging_dir: str | None = None
    randomize_start_duration: NonNegativeInt = 0


class LocalSettings(ExecutorSettings):
    """`LocalPipelineExecutor`: processes on this machine."""


class SlurmSettings(ExecutorSettings):
    """`SlurmPipelineExecutor`: an array of jobs, and one job that joins their parts."""

    tasks: PositiveInt
    time: str
    partition: str
    cpus_per_task: PositiveInt = 1
    mem_per_cpu_gb: PositiveInt = 2
    tasks_per_job: PositiveInt = 1
    job_name: str = "terakoya-prepare"
    qos: str | None = "normal"
    env_command: str | None = None
    condaenv: str | None = None
    venv_path: str | None = None
    sbatch_args: dict[str, str | int | bool] = {}
    srun_args: dict[str, str | int] = {}
    with_srun: bool = True
    max_array_size: PositiveInt = 1001
    slurm_logs_folder: str | None = None
    requeue: bool = True
    requeue_signals: tuple[str, ...] | None = ("SIGUSR1",)
    mail_type: str = "ALL"
    mail_user: str | None = None


class RaySettings(ExecutorSettings):
    """`RayPipelineExecutor`: actors of the Ray cluster at `RAY_ADDRESS`, or of a new one on this machine.

    Attributes:
        time: seconds after which a task is cancelled.
    """

    cpus_per_task: PositiveInt = 1
    mem_per_cpu_gb: NonNegativeFloat = 2
    tasks_per_job: PositiveInt = 1
    ray_remote_kwargs: dict[str, Any] | None = None
    time: PositiveFloat | None = None


_MODELS: dict[Executor, type[ExecutorSettings]] = {"local": LocalSettings, "slurm": SlurmSettings, "ray": RaySettings}
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
    model = _MODELS[executor]
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

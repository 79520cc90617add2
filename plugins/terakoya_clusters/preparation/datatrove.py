"""Prepares a store with datatrove's executors: processes on this machine, a Slurm array, or a Ray cluster.

A task encodes its share of the blocks that have no part yet, with the code and the parts of
`terakoya.preparation.local`, so that either engine continues the work of the other. Only the parts on disk decide what
is missing; datatrove's own record of completed tasks is not used. One more task joins the parts. See
https://github.com/huggingface/datatrove.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dill
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.utils.stats import PipelineStats

from terakoya.errors import UserError, import_extra
from terakoya.preparation.encoding import BlockEncoder
from terakoya.preparation.job import PrepareJob
from terakoya.process_pool import in_order
from terakoya.store.token_store import StoreFacts
from terakoya_clusters.preparation.block_list import list_blocks
from terakoya_clusters.preparation.datatrove_settings import (
    Executor,
    ExecutorSettings,
    RaySettings,
    SlurmSettings,
    executor_settings,
)
from terakoya_clusters.preparation.datatrove_steps import EncodeBlocks, JoinParts, join_parts
from terakoya_clusters.preparation.submitted_jobs import record_jobs

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class SubmittedJobs:
    """The numbers of the submitted Slurm jobs: `encode` (None if every part exists) and `join`."""

    encode: str | None
    join: str


def prepare_with_datatrove(
    job: PrepareJob, *, executor: Executor = "local", settings: Mapping[str, Any] | None = None
) -> StoreFacts | SubmittedJobs:
    """Encodes and joins `job`. With `slurm` it submits the jobs and returns at once.

    `settings` are the executor's, see `executor_settings`; where they do not say how many tasks or workers, it is the
    option `processes`.

    Raises UserError as `prepare_locally` does, for settings that the executor does not have, if parts are missing after
    it has returned, and if Slurm or Ray is not available.
    """
    parsed = executor_settings(executor, settings or {})
    _refuse_passwords(job)
    if executor == "slurm" and "SLURM_ARRAY_TASK_ID" in os.environ:
        raise UserError("--executor slurm: expected to be started outside of Slurm's array jobs, this is a task of one")
    with job.lock_folder():
        if (facts := job.find_finished()) is not None:
            return facts
        encoder = BlockEncoder(job.task)
        job.begin(encoder)
        blocks = list_blocks(job)
        numbers = blocks.missing_parts(job.task.parts)
        if len(numbers) < len(blocks.blocks):
            logger.info("%d of %d parts were there already", len(blocks.blocks) - len(numbers), len(blocks.blocks))
        logs = Path(parsed.logging_dir or job.out.with_name(f"{job.out.name}.datatrove")).absolute()
        encode, join = EncodeBlocks(job, numbers), JoinParts(job)
        if isinstance(parsed, SlurmSettings):
            return _submit(encode, join, parsed, logs)
        if numbers:
            run = _run_ray if isinstance(parsed, RaySettings) else _run_local
            run(encode, parsed, logs, job.options.process_count)
        return join_parts(job, encoder, logs=logs)


def _refuse_passwords(job: PrepareJob) -> None:
    """Raises UserError for a corpus with a password in its address: datatrove writes its jobs, addresses included, into
    the folder of its logs."""
    for source in job.task.corpus.sources:
        if not isinstance(source, Path) and str(source) != source.path:
            raise UserError(
                f"{source}: expected an address without a password with --engine datatrove, whose job files would hold "
                "it; give it as the environment variables or the configuration file of that kind of storage, or use "
                "--engine processes"
            )


# --------------------------------------------------------------------------------------------------------- executors


def _user_settings(settings: ExecutorSettings, *without: str) -> dict[str, Any]:
    """Returns the settings that the user gave; for the others, datatrove's own defaults apply."""
    return {name: getattr(settings, name) for name in settings.model_fields_set if name not in without}


def _run_local(step: EncodeBlocks, settings: ExecutorSettings, logs: Path, processes: int) -> None:
    tasks = min(settings.tasks or processes, len(step.numbers))
    most = processes if settings.workers is None else settings.workers
    _Local(
        pipeline=[step],
        tasks=tasks,
        workers=tasks if most == -1 else min(most, tasks),
        logging_dir=str(logs),
        skip_completed=False,
        **_user_settings(settings, "tasks", "workers", "logging_dir"),
    ).run()


class _Local(LocalPipelineExecutor):
    def run(self) -> None:
        """Runs all tasks in processes that end with this one. Raises UserError if one dies: datatrove's own pool would
        wait for it forever."""
        self.save_executor_as_json()
        pickled = dill.dumps(self)
        remedy = "Finished parts are kept: run the same command again and it finishes what is left"
        calls = ((rank, (rank,)) for rank in range(self.tasks))
        ended = in_order(calls, self.workers, _task_runner, (pickled,), task="prepare", remedy=remedy)
        stats = [each for _, each in ended]
        with self.logging_dir.open("stats.json", "wt") as file:
            sum(stats, start=PipelineStats()).save_to_disk(file)


def _task_runner(pickled: bytes) -> Callable[[int], PipelineStats]:
    return partial(_run_task, pickled)


def _run_task(pickled: bytes, rank: int) -> PipelineStats:
    # unpickled for each task, so that each has its own statistics; only the first one logs to the console
    return dill.loads(pickled)._run_for_rank(rank, local_rank=rank)


def _run_ray(step: EncodeBlocks, settings: ExecutorSettings, logs: Path, processes: int) -> None:
    ray = import_extra("ray", "ray", "--executor ray")
    starts_ray = not ray.is_initialized()
    if starts_ray:
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        RayPipelineExecutor(
            pipeline=[step],
            tasks=min(settings.tasks or processes, len(step.numbers)),
            workers=processes if settings.workers is None else settings.workers,
            logging_dir=str(logs),
            skip_completed=False,
            **_user_settings(settings, "tasks", "workers", "logging_dir"),
        ).run()
    finally:
        if starts_ray:
            ray.shutdown()


class _Slurm(SlurmPipelineExecutor):
    def launch_merge_stats(self) -> None:
        """Submits nothing: the job that merges statistics would wait forever if a task of the array fails."""


def _submit(encode: EncodeBlocks, join: JoinParts, settings: SlurmSettings, logs: Path) -> SubmittedJobs:
    common = _user_settings(settings, "tasks", "tasks_per_job", "workers", "logging_dir", "max_array_size", "job_name")
    if not (settings.env_command or settings.condaenv or settings.venv_path):
        common["env_command"] = f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"'
    array = None
    if encode.numbers:
        array = _Slurm(
            pipeline=[encode],
            tasks=min(settings.tasks, len(encode.numbers)),
            tasks_per_job=settings.tasks_per_job,
            workers=-1 if settings.workers is None else settings.workers,
            max_array_size=settings.max_array_size,
            job_name=settings.job_name,
            logging_dir=str(logs / "encode"),
            skip_completed=False,
            **common,
        )
    joining = _Slurm(
        pipeline=[join],
        tasks=1,
        job_name=f"{settings.job_name}-join",
        logging_dir=str(logs / "join"),
        skip_completed=False,
        depends=array,
        run_on_dependency_fail=True,  # it then reports which parts are missing, instead of waiting forever
        **common,
    )
    try:
        joining.run()
    except FileNotFoundError as error:
        raise UserError(f"--executor slurm: {error.filename}: not found; run this where jobs are submitted") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"--executor slurm: sbatch refused the job ({error}); its own message is above") from error
    finally:
        jobs = [str(step.job_id) for step in (array, joining) if step is not None and step.job_id is not None]
        if jobs:
            record_jobs(encode.job.task.parts, jobs)
    return SubmittedJobs(str(array.job_id) if array is not None else None, str(joining.job_id))

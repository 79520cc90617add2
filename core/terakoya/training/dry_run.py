"""`train --dry-run`: everything that could stop a run, tried in a minute; nothing is written."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.distributed.context import connect
from terakoya.training.distributed.topology import LaunchInfo
from terakoya.training.run import Run
from terakoya.training.run_folder import free_bytes
from terakoya.training.run_log import RunLog
from terakoya.training.setup import Advice, build_trainer, no_advice
from terakoya.training.stores import Stores
from terakoya.training.trainer import Trainer


def dry_run(
    parameters: Parameters,
    out: Path,
    *,
    node_rank: int | None = None,
    expected_processes: int | None = None,
    advice: Advice = no_advice,
) -> None:
    """Opens the stores, checks the world against the batch table and the disk against the checkpoints, takes one step.

    Raises:
        UserError: what would stop the run.
    """
    launched = LaunchInfo.from_environment(node_rank=node_rank)
    if expected_processes is not None and launched.launcher and launched.world_size != expected_processes:
        raise UserError(f"--processes {expected_processes}, but {launched.launcher} started {launched.world_size}")
    console = Console(stderr=True, highlight=False, quiet=launched.rank != 0)
    stores = Stores.open(parameters)
    for store in [*stores.train, *stores.validation.values()]:
        facts = store.facts
        console.print(f"store {store.folder}: {facts.documents:,} documents, {facts.tokens:,} tokens", soft_wrap=True)
    context = connect(
        launched,
        deepspeed=parameters.parallel.engine == "deepspeed",
        replica_size=parameters.parallel.replica_size,
        timeout_seconds=parameters.parallel.timeout_seconds,
    )
    try:
        explaining = advice(parameters, stores.vocabulary, context)
        with tempfile.TemporaryDirectory() as scratch, explaining:
            run_log = RunLog(Path(scratch), (), {}, active=context.is_main)
            trainer = build_trainer(parameters, out, stores, context, run_log, registry())
            need = _bytes_needed(trainer)
            free = free_bytes(out)
            console.print(
                f"disk: {parameters.checkpoint.keep} checkpoints and one being written need "
                f"{need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
                soft_wrap=True,
            )
            if need > free:
                raise UserError(f"{out}: needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; see checkpoint.keep")
            if parameters.checkpoint.async_save:
                each, more = _bytes_copied(trainer)
                console.print(
                    f"checkpoint.async_save: {each / 1e9:.2f} GB of host memory in each process for a copy of the "
                    f"state, {more / 1e9:.2f} GB more in rank 0's for one of the model",
                    soft_wrap=True,
                )
            console.print(f"learning rate: {_course(trainer.run)}", soft_wrap=True)
            start = time.perf_counter()
            report = trainer.one_step()
            values = report.values or {}
            console.print(
                f"one step: loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.3f}, "
                f"{report.tokens:,} tokens in {time.perf_counter() - start:.1f} s; nothing was written to {out}",
                soft_wrap=True,
            )
            run_log.close()
    finally:
        context.close(failed=True)


def _bytes_needed(trainer: Trainer) -> int:
    """What the checkpoints that stay and one being written take, in fp32: weights and, of those that are trained, two
    moments in `state/`, the weights in `model/` again. With lora only adapters, and the merged model of the last."""
    checkpoints = trainer.parameters.checkpoint.keep + 1
    every, trained = trainer.facts["parameter_count"], trainer.facts["trained_parameter_count"]
    if trainer.parameters.lora is not None:
        return 4 * (3 * trained * checkpoints + every)
    return 4 * (2 * every + 2 * trained) * checkpoints


def _bytes_copied(trainer: Trainer) -> tuple[int, int]:
    """What saving behind the steps keeps in host memory: of each process its share of what `state/` is for
    `_bytes_needed`, and of rank 0 the weights that `model/` is written from."""
    every, trained = trainer.facts["parameter_count"], trainer.facts["trained_parameter_count"]
    share = 4 * (every + 2 * trained) // trainer.run.world_size
    return share, 4 * every if trainer.saver.copies_model() else 0


def _course(run: Run) -> str:
    """The learning rate in the first step, after each quarter of the run, and in the last step."""
    start, steps = run.progress(), max(1, run.length.steps)
    said = []
    names = ("in the first step", "after a quarter", "half-way", "after three quarters", "in the last step")
    for quarter, name in enumerate(names):
        step = min(steps - 1, quarter * steps // 4)
        there = replace(start, step=step, tokens=start.max_tokens * step // steps)
        said.append(f"{start.learning_rate * run.parameters.schedule.factor(there):.2e} {name}")
    return ", ".join(said)

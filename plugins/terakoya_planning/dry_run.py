"""`train --dry-run`: tries everything that could stop a run, in a minute, and writes nothing."""

from __future__ import annotations

import contextlib
import math
import shutil
import stat
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from terakoya.components.run import StepReport
from terakoya.config.parameters import Parameters
from terakoya.distributed.topology import RankBatch
from terakoya.errors import UserError
from terakoya.log import new_console
from terakoya.training.model.compilation import explain_compile_errors
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog
from terakoya.training.run_plan import PlannedPhase
from terakoya.training.saving import choose_saved_models
from terakoya.training.setup import build_trainer
from terakoya.training.start.meeting import DEFAULTS, StartOptions, meet
from terakoya.training.trainer import Trainer
from terakoya_planning.step_rate import StepRate, time_steps

TIMED_SECONDS = 10.0
"""A first step that takes longer is the only one of its phase; otherwise others are timed for a quarter of this."""


@dataclass(frozen=True)
class DrySteps:
    """How fast the steps of a dry run were.

    Attributes:
        hours: what the `steps` of the whole run and its validations take at this speed.
        rate: of the first phase, in which this rank took the rows of `share`.
        parameters: those of the run, in the precision of this machine.
    """

    hours: float
    steps: int
    rate: StepRate
    share: RankBatch
    processes: int
    vocab_size: int
    parameters: Parameters


def dry_run(parameters: Parameters, out: Path, options: StartOptions = DEFAULTS) -> DrySteps:
    """Opens the stores, checks the processes against the batch table and the disk space, and takes one step, and a few
    more to time them. Where the run in `out` is kept in another place, looks whether that can be read. Returns how fast
    the steps were. Raises UserError for anything that would stop the run, or keep one of its trackers from recording
    it."""
    parameters, stores, context = meet(parameters, out, options)
    place = options.place
    console = new_console(stderr=True, quiet=not context.is_main)
    with context:
        for tracker in parameters.trackers:
            context.decide_on_main(tracker.check)
        if not place.is_local:
            context.decide_on_main(place.has_run)
            console.print(f"{place}: answers; the run is kept there", soft_wrap=True)
        for store in [*stores.train, *stores.validation.values()]:
            facts = store.facts
            console.print(
                f"store {store.folder}: {facts.documents:,} documents, {facts.tokens:,} tokens", soft_wrap=True
            )
        with (
            tempfile.TemporaryDirectory() as scratch,
            closing(RunLog(Path(scratch), (), {}, active=context.is_main)) as run_log,
            explain_compile_errors(),
            options.advice(parameters, stores.vocabulary, context),
        ):
            trainer = build_trainer(parameters, out, stores, context, run_log)
            kept = parameters.kept_checkpoints(trainer.plan.length.steps)
            needed = _checkpoint_bytes(trainer, kept + 1)
            free = free_bytes(out)
            console.print(
                f"disk: {kept} checkpoints and one being written need "
                f"{needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
                soft_wrap=True,
            )
            if needed > free + held_bytes(out):  # a run that goes on has some of its checkpoints already
                raise UserError(
                    f"{out}: needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; see checkpoint.keep and events"
                )
            if parameters.checkpoint.async_save:
                state_bytes, model_bytes = _snapshot_bytes(trainer)
                console.print(
                    f"checkpoint.async_save: {state_bytes / 1e9:.2f} GB of host memory in each process for a copy of "
                    f"the state, {model_bytes / 1e9:.2f} GB more in rank 0 for a copy of the model",
                    soft_wrap=True,
                )
            for phase in trainer.plan.phases:
                title = f"{phase.title()}: " if trainer.plan.has_phases else ""
                console.print(title + _describe_learning_rate(trainer.run, phase), soft_wrap=True)
            seconds, rates, phases = 0.0, [], trainer.plan.phases
            for phase in phases:
                said, rate = _try_step(trainer, phase, out)
                console.print(said, soft_wrap=True)
                rates.append(rate)
                seconds += phase.span.steps * rate.step(phase.rank_batch.micro_steps)
            steps = trainer.plan.length.steps
            seconds += _validation_seconds(trainer, steps, rates[0])
            return DrySteps(
                seconds / 3600, steps, rates[0], phases[0].rank_batch, context.world_size, stores.vocabulary.size,
                parameters,
            )  # fmt: skip


def _checkpoint_bytes(trainer: Trainer, checkpoints: int) -> int:
    """Returns the disk space that `checkpoints` checkpoints take, in bytes.

    In fp32: all weights, or what is trained beside them, and two moments of the trained weights in `state/`, with what
    event plugins keep; and all weights in each `model/`.
    """
    parameters = trainer.parameters
    weights, trained = trainer.facts["parameter_count"], trainer.facts["trained_parameter_count"]
    saved = weights if parameters.trained_beside is None else trained
    state_bytes = 4 * (saved + 2 * trained) + parameters.count_event_bytes(trained)
    saved_models = choose_saved_models(parameters, full_module=trainer.engine.full_module)
    models = {"every": checkpoints, "last": 1, "never": 0}[saved_models]
    return state_bytes * checkpoints + 4 * weights * models


def _snapshot_bytes(trainer: Trainer) -> tuple[int, int]:
    """Returns the host memory that background saves keep, in bytes: of this process, for its shards of `state/` as in
    `_checkpoint_bytes`; and of rank 0, for the weights of `model/`, or for what is trained beside them. On a
    GPU it is pinned, and torch allocates pinned memory in powers of two, a tensor each."""
    parameters, engine, run = trainer.parameters, trainer.engine, trainer.run
    weights, trained = trainer.facts["parameter_count"], trainer.facts["trained_parameter_count"]
    saved = weights if parameters.trained_beside is None else trained
    sizes = [4 * math.prod(shape) for shape in trainer.shapes.values()]
    rounded = sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes) if run.device.type == "cuda" else 1.0
    own = sum(shard.value.numel() for shard in engine.weight_shards())  # of which event plugins keep something
    state_bytes = round(rounded * (4 * (saved + 2 * trained) // run.world_size + parameters.count_event_bytes(own)))
    if not engine.full_module:  # the model is built of the files
        return state_bytes, 0
    is_copied = parameters.trained_beside is not None or choose_saved_models(parameters, full_module=True) != "never"
    return state_bytes, round(rounded * 4 * saved) if is_copied else 0


def _try_step(trainer: Trainer, phase: PlannedPhase, out: Path) -> tuple[str, StepRate]:
    """Takes the first step of `phase`, and further ones while a few seconds last; says how the first went, and returns
    the rate of the others: that of the first where it took longer than all together may."""
    run, start = trainer.run, time.perf_counter()
    run.step, run.consumed_rows = phase.span.first_step, phase.span.first_row
    report = trainer.one_step(record=True)
    seconds = trainer.context.broadcast(time.perf_counter() - start)
    rate = StepRate(seconds / phase.rank_batch.micro_steps, 0.0, 0.0)
    others = phase.span.steps - 1
    if others and seconds < TIMED_SECONDS:
        rate = time_steps(trainer, seconds=TIMED_SECONDS / 4, most=others)
    return _describe_step(trainer, phase, report, seconds, out), rate


def _describe_step(trainer: Trainer, phase: PlannedPhase, report: StepReport, seconds: float, out: Path) -> str:
    values = report.values or {}
    if trainer.plan.has_phases:
        return (
            f"first step of {phase.title()}: loss {values['loss']:.4f}, {report.tokens:,} tokens in "
            f"{seconds:.1f} s; nothing was written to {out}"
        )
    return (
        f"one step: loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.3f}, "
        f"{report.tokens:,} tokens in {seconds:.1f} s; nothing was written to {out}"
    )


def _validation_seconds(trainer: Trainer, steps: int, rate: StepRate) -> float:
    """Returns what the validations of a run of so many `steps` take."""
    every, batch = trainer.parameters.evaluation, trainer.plan.validation_batch
    if every is None:
        return 0.0
    rows = sum(min(len(source), every.batches * batch.global_rows) for source in trainer.validation.values())
    validations = 1 + -(-steps // every.steps)  # before the first step, and at the end
    return validations * rows / batch.global_rows * batch.micro_steps * rate.evaluation


def _describe_learning_rate(run: Run, phase: PlannedPhase) -> str:
    """Says what the learning rate is in the first step of the run or the phase, after each quarter, and in the last
    step."""
    start, span = run.progress(), phase.span
    rates = []
    for quarter in range(5):
        step = span.first_step + min(span.steps - 1, quarter * span.steps // 4)
        tokens = start.max_tokens * step // max(1, start.max_steps)
        tokens_before = start.max_tokens * span.first_step // max(1, start.max_steps)
        rates.append(f"{phase.learning_rate(replace(start, step=step, tokens=tokens), tokens_before):.2e}")
    first, early, middle, late, last = rates
    return (
        f"learning rate: {first} in the first step, {early} after a quarter, {middle} half-way, "
        f"{late} after three quarters, {last} in the last step"
    )


def free_bytes(folder: Path) -> int:
    """Returns the free disk space in bytes where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def held_bytes(folder: Path) -> int:
    """Returns the bytes of the files in `folder`, each counted once, however many names it has."""
    sizes = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a run that trains removes old checkpoints
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                sizes[facts.st_dev, facts.st_ino] = facts.st_size
    return sum(sizes.values())

"""Continues a run: finds its newest checkpoint, checks what has changed since, and sets the trainer to its step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from terakoya.distributed.context import DistributedContext
from terakoya.errors import UserError
from terakoya.json_settings import value_at
from terakoya.log import translated
from terakoya.plugins import registry
from terakoya.plugins.run_record import check_plugins
from terakoya.runs.checkpoints import read_manifest, reading
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.recovery import recover_newest
from terakoya.training.checkpoint.restoring import check_base_unchanged
from terakoya.training.resuming.changes import check_global_batch, consent_of_fork, other_rounding, refuse_changes
from terakoya.training.rollback import Rollback
from terakoya.training.run import Run
from terakoya.training.run_log import RunLog
from terakoya.training.trainer import Trainer


def newest_checkpoint(
    out: Path, context: DistributedContext, run_log: RunLog, *, start_over: bool = False
) -> Path | None:
    """Returns the newest whole checkpoint of the run in `out`, from which it continues; None without one. With
    `start_over` the run may begin at step 0 although it has had checkpoints. Collective. On every rank, raises as
    `recover_newest` does."""
    recover = partial(recover_newest, out / "checkpoints", start_over=start_over)
    folder, messages = context.decide_on_main(recover)
    for message in messages:
        run_log.warn(message)
    if folder is None and start_over:
        run_log.write("resume", step=0, folder=None, world_size=context.world_size)
        run_log.print("starts at step 0, as --start-over says")
    return folder


def resume(trainer: Trainer, folder: Path, allow_change: frozenset[str]) -> None:
    """Sets `trainer` to the step of the checkpoint `folder` of its run.

    Raises:
        UserError: parameters, data or plugins have changed, and the change was not allowed.
        TemporaryFailure: the checkpoint cannot be read now.
    """
    run, run_log = trainer.run, trainer.run_log
    manifest = read_manifest(folder)
    fork = consent_of_fork(run.folder, folder)
    if fork is not None:
        allow_change |= frozenset(fork.changed)
        forked_from: Mapping[str, Any] | None = fork.model_dump(mode="json")
    else:
        forked_from = manifest.get("forked_from")
    stores = trainer.facts["stores"]  # which may lie elsewhere on another rank, and hold the same
    check = partial(refuse_changes, run.folder, manifest, run.parameters, stores, allow_change, run_log.print)
    for message in run.context.decide_on_main(check):
        run_log.warn(message)
    plugins = check_plugins(registry(), manifest["plugins"], run.parameters.dump())
    if plugins.missing:
        raise UserError(f"{folder}: " + "; ".join(plugins.missing))
    for message in plugins.changed:
        run_log.warn(message)
    started_from = manifest["started_from"]
    if run.parameters.trained_beside is None:
        trainer.facts = {**trainer.facts, "started_from": started_from}
    else:  # the base weights may be in another folder now, where the user allows that, but must be the same
        check_base_unchanged(trainer.facts["started_from"], started_from)
    if forked_from is not None:
        trainer.facts = {**trainer.facts, "forked_from": forked_from}
        run.forked_at = forked_from["step"]
    for message in other_rounding(manifest, trainer.facts["world"]):
        run_log.warn(message)
    with reading(folder):
        now = run.parameters.dump()
        if any(manifest["parameters"].get(key) != now[key] for key in ("architecture", "objective")):
            checkpoint_state.check_shapes(folder, trainer.shapes)
        checkpoint_state.load(folder, trainer.engine)
    run.step = manifest["step"]
    run.consumed_rows = manifest["consumed_rows"]
    run.consumed_tokens = manifest["consumed_tokens"]
    run.validation_losses = tuple((step, loss) for step, loss in manifest["validation_losses"])
    _restore_data_order(trainer, manifest, folder)
    _warn_of_moved_stores(trainer, manifest)
    trainer.step_log.restore(manifest["meters"], manifest["metered_from"])
    trainer.health.load(manifest["step_health"])
    trainer.skipped.rollbacks = Rollback.of_manifest(manifest)
    _warn_of_late_skips(trainer, manifest)
    if trainer.engine.scaler is not None and manifest["loss_scaling"] is not None:
        trainer.engine.scaler.load(manifest["loss_scaling"])
    trainer.events.load(folder, manifest["events"])
    trainer.last_checkpoint = folder
    trainer.saver.step = trainer.saver.saved_step = run.step
    run_log.write("resume", step=run.step, folder=folder.name, world_size=run.world_size)
    run_log.print(f"resumed from {folder} at step {run.step:,}")
    if run.finished:
        run_log.print(describe_finished(run))
    else:
        _warn_of_other_rate(trainer, *manifest["learning_rates"])


def _warn_of_other_rate(trainer: Trainer, last: float, following: float | None) -> None:
    """Warns if the next step has another learning rate than `following`, which it had when the checkpoint was written;
    or at the end of the run (None), where the plan of now gives its last step clearly another one than `last`."""
    run, now = trainer.run, trainer.next_learning_rate()
    trainer.last_learning_rate = last
    if following is None:
        progress = run.progress()
        before = replace(progress, step=run.step - 1, tokens=round(progress.tokens - progress.tokens_per_step))
        planned = trainer.plan.phase_at(run.step - 1).learning_rate(before, run.phase_tokens)
        moved = not math.isclose(planned, last, rel_tol=0.1)  # tokens of that step are an estimate
    else:
        moved = not math.isclose(now, following, rel_tol=1e-6)
    if moved and last:
        trainer.run_log.warn(
            f"the learning rate was {last:.2e} in step {run.step:,}, and is {now:.2e} in step {run.step + 1:,}: the "
            "schedule counts over the whole run as it is now; `terakoya fork` continues under another schedule, and "
            "leaves this run as it is"
        )


def describe_finished(run: Run) -> str:
    """Returns that the steps of `run` are all taken, and which key continues it."""
    key, length = run.parameters.length_key, run.length
    by_tokens = length.unit == "tokens"
    done, whole = (run.consumed_tokens, length.tokens) if by_tokens else (run.step, length.steps)
    return (
        f"the run is finished: {done:,} of {whole:,} {translated(length.unit)}, nothing is left to train; a larger "
        f"value of {key} continues it, in the parameter file or with --set {key}=NUMBER"
    )


def _restore_data_order(trainer: Trainer, manifest: Mapping[str, Any], folder: Path) -> None:
    """Makes the next step begin with the row after the last one used. Raises UserError if the size of the global batch
    has changed, or phases that the run has taken."""
    run, plan, global_rows = trainer.run, trainer.plan, trainer.plan.validation_batch.global_rows
    if plan.has_phases:
        plan.check_borders(manifest)
    else:
        check_global_batch(folder, manifest, run.parameters)
    trainer.batches.plan = plan.continued_at(run.step, run.consumed_rows)
    if plan.has_phases:
        _restore_phase(trainer, manifest.get("phase"))
        return
    run.length = run.length.after_resuming(step=run.step, consumed_rows=run.consumed_rows, global_rows=global_rows)
    trainer.facts = {**trainer.facts, "max_steps": run.length.steps}
    had_other_rows = "phase" in manifest or "forked_from" in manifest  # a fork was told when it began
    if run.consumed_rows != run.step * global_rows and not run.finished and not had_other_rows:
        trainer.run_log.warn(
            f"the last of the {run.step:,} steps before held fewer rows than the others, as the run was to end with "
            "it: the steps from here on differ from those of a run that was longer from the beginning"
        )


def _warn_of_moved_stores(trainer: Trainer, manifest: Mapping[str, Any]) -> None:
    """Says which stores the run does not read on where it was: the place in each follows from the mixture and the rows
    of the run, as if the mixture had always been this one."""
    before, now = manifest["parameters"], trainer.run.parameters.dump()
    other_rows = any(value_at(before, key) != value_at(now, key) for key in ("seed", "data.sequence_length"))
    if other_rows:
        return
    names = {fingerprint: name for name, fingerprint in (manifest["stores"] | trainer.facts["stores"]).items()}
    old = _rows_of_stores(manifest["positions"], manifest["stores"])
    new = _rows_of_stores(trainer.batches.loader.store_positions(trainer.run.consumed_rows), trainer.facts["stores"])
    moved = [f"{names[each]} {old[each]:,} -> {new[each]:,}" for each in new if new[each] != old[each]]
    if moved:
        trainer.run_log.warn(
            "data: the mixture counts as if it had been this one from the first row on, which changes the next row of "
            f"some stores: {', '.join(moved)}. To go on where each store was, leave the mixture up to here as it was, "
            f"and give the new one to data.stages, or to a phase, from step {trainer.run.step + 1:,} on"
        )


def _warn_of_late_skips(trainer: Trainer, manifest: Mapping[str, Any]) -> None:
    """Says which steps `data.skip_steps` names too late: the run had taken them when this checkpoint was written."""
    run = trainer.run
    skipped = [(first, last) for first, last in manifest["parameters"]["data"].get("skip_steps", ())]
    skipped += [(each.first, each.last) for each in trainer.skipped.rollbacks]
    late = []
    for first, last in run.parameters.data.skip_steps:
        steps = range(first, min(last, run.step) + 1)
        taken = [step for step in steps if not any(start <= step <= end for start, end in skipped)]
        if taken:
            late.append([taken[0], taken[-1]])
    if late:
        trainer.run_log.warn(
            f"data.skip_steps: {json.dumps(late)} comes too late: the checkpoint of step {run.step:,}, from which the "
            "run continues, was trained on the rows of these steps. To skip them, stop the run, remove the checkpoints "
            f"of step {min(first for first, _ in late):,} and later, and give the same command again"
        )


def _rows_of_stores(positions: Sequence[Mapping[str, Any]], stores: Mapping[str, str]) -> Counter[str]:
    """Returns how many rows of each store were read, of all lengths, by its fingerprint in `stores`."""
    rows: Counter[str] = Counter()
    for each in positions:
        rows[stores[each["store"]]] += each["rows"]
    return rows


def _restore_phase(trainer: Trainer, saved: Mapping[str, Any] | None) -> None:
    """Takes up the phase of the last step. Its schedule counts the tokens since it began: as the checkpoint has `saved`
    them, or where the run had no such phase then, as they are expected."""
    run = trainer.run
    if run.step == 0:
        return
    phase = trainer.plan.phase_at(run.step - 1)
    if saved is not None and saved["first_step"] == phase.span.first_step:
        tokens = saved["tokens_before"]
    else:
        tokens = round(run.consumed_tokens * phase.span.first_row / max(1, run.consumed_rows))
    trainer.begin_phase(phase, tokens=tokens)

"""Continues a run: finds its newest checkpoint, checks what has changed since, and sets the trainer to its step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terakoya.config import lora as lora_settings
from terakoya.config.parameters import RESUME_MAY_CHANGE, Parameters, changed_keys, whole_sections
from terakoya.errors import UserError
from terakoya.json_settings import short_json, value_at
from terakoya.plugins.run_record import check_plugins
from terakoya.runs.checkpoints import read_manifest, reading
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.recovery import recover_newest
from terakoya.training.checkpoint.restoring import check_base_unchanged
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.model import lora
from terakoya.training.rollback import Rollback
from terakoya.training.run_log import RunLog
from terakoya.training.trainer import Trainer

EVALUATION = ("evaluation.steps", "evaluation.batches")
"""Keys of which the losses depend that a schedule follows."""


def newest_checkpoint(
    out: Path, context: DistributedContext, run_log: RunLog, *, start_over: bool = False
) -> Path | None:
    """Returns the newest whole checkpoint of the run in `out`, from which it continues; None without one. Collective.

    Args:
        start_over: whether the run may begin at step 0 although it has had checkpoints.

    Raises:
        UserError: on every rank, as `recover_newest` does.
    """
    found: tuple[Path | None, list[str]] | UserError = (None, [])
    if context.is_main:
        try:
            found = recover_newest(out / "checkpoints", start_over=start_over)
        except UserError as error:
            found = error
    found = context.broadcast(found)
    if isinstance(found, UserError):
        raise found
    folder, messages = found
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
    _refuse_changes(manifest, run.parameters, trainer.facts["stores"], run_log, allow_change)
    plugins = check_plugins(trainer.registry, manifest["plugins"], run.parameters.dump())
    if plugins.missing:
        raise UserError(f"{folder}: " + "; ".join(plugins.missing))
    for message in plugins.changed:
        run_log.warn(message)
    started_from = manifest.get("started_from")
    if run.parameters.lora is None:
        trainer.facts = {**trainer.facts, "started_from": started_from}
    else:  # the base weights may be in another folder now, where the user allows that, but must be the same
        check_base_unchanged(trainer.facts["started_from"], started_from)
    before = manifest["world"].get("compile", "off")
    if before != trainer.compiled:
        run_log.warn(
            f"compile was {before}, and is {trainer.compiled}: the steps from here on are rounded differently from "
            "those of a run that was never stopped"
        )
    graphs = manifest["parameters"].get("cuda_graphs", False)
    if before == trainer.compiled and graphs != run.parameters.cuda_graphs:
        run_log.warn(
            f"cuda_graphs was {str(graphs).lower()}, and is {str(not graphs).lower()}: the steps from here on may be "
            "rounded differently from those of a run that was never stopped"
        )
    streams = [each["world"].get("bf16_stream", False) for each in (manifest, trainer.facts)]
    if streams[0] != streams[1]:
        modes = ["the bf16 stream" if each else "autocast" for each in streams]
        run_log.warn(
            f"the run used {modes[0]}, and uses {modes[1]} from here on: its steps are rounded differently from those "
            "of a run that was never stopped"
        )
    with reading(folder):
        now = run.parameters.dump()
        if any(manifest["parameters"].get(key) != now[key] for key in ("architecture", "objective")):
            checkpoint_state.check_shapes(folder, trainer.shapes)
        checkpoint_state.load(folder, trainer.engine)
    run.step = manifest["step"]
    run.consumed_rows = manifest["consumed_rows"]
    run.consumed_tokens = manifest["consumed_tokens"]
    run.validation_losses = tuple((step, loss) for step, loss in manifest.get("validation_losses", ()))
    _restore_data_order(trainer, manifest, folder)
    trainer.restore_meters(manifest["meters"])
    if "step_health" in manifest:
        trainer.health.load(manifest["step_health"])
    trainer.skipped.rollbacks = Rollback.of_manifest(manifest)
    if trainer.engine.scaler is not None and manifest.get("loss_scaling") is not None:
        trainer.engine.scaler.load(manifest["loss_scaling"])
    for name, state in manifest.get("events", {}).items():
        if name in trainer.listeners:
            trainer.listeners[name].load(state)
    trainer.last_checkpoint = folder
    trainer.saver.step = trainer.saver.saved_step = run.step
    run_log.write("resume", step=run.step, folder=folder.name, world_size=run.world_size)
    run_log.print(f"resumed from {folder} at step {run.step:,}")


def _restore_data_order(trainer: Trainer, manifest: Mapping[str, Any], folder: Path) -> None:
    """Makes the next step begin with the row after the last one used.

    Raises:
        UserError: the size of the global batch has changed.
    """
    run, global_rows = trainer.run, trainer.rank_batch.global_rows
    previous_rows = sum(manifest["parameters"]["batch_size"].values())
    if previous_rows != global_rows:
        raise UserError(
            f"{folder}: {run.consumed_rows:,} rows were used in {run.step:,} steps of {previous_rows}, but batch_size "
            f"is now {global_rows}: keep the global batch"
        )
    trainer.batches.start_at(run.step, run.consumed_rows)
    run.length = run.length.after_resuming(step=run.step, consumed_rows=run.consumed_rows, global_rows=global_rows)
    trainer.facts = {**trainer.facts, "max_steps": run.length.steps}
    if run.consumed_rows != run.step * global_rows and not run.finished:
        trainer.run_log.warn(
            f"the last of the {run.step:,} steps before held fewer rows than the others, as the run was to end with "
            "it: the steps from here on differ from those of a run that was longer from the beginning"
        )


def _refuse_changes(
    manifest: Mapping[str, Any],
    parameters: Parameters,
    fingerprints: Mapping[str, str],
    run_log: RunLog,
    allow_change: frozenset[str],
) -> None:
    """Prints every parameter that has changed since the checkpoint.

    Args:
        fingerprints: folder of each store -> its fingerprint.

    Raises:
        UserError: parameters or stores have changed that must not, or that `allow_change` does not name.
    """
    before, now = _with_defaults(manifest["parameters"]), parameters.dump()
    changed = changed_keys(before, now)
    for key in whole_sections(changed, before, now):
        old, new = (short_json(value_at(each, key)) for each in (before, now))
        run_log.print(f"parameter {key}: was {old}, is {new}")
    allowed = RESUME_MAY_CHANGE | allow_change
    refused = [key for key in changed if not any(key == name or key.startswith(f"{name}.") for name in allowed)]
    refused = whole_sections(refused, before, now)
    if parameters.schedule.needs_validation:
        refused += _changed_validation(changed, manifest, parameters, fingerprints, allow_change)
    fixed = [key for key in changed if key.partition(".")[0] == lora.KEY and key not in lora_settings.CHANGEABLE]
    if fixed:
        raise UserError(
            f"the run was started with other values of {', '.join(fixed)}, which determine what its checkpoints hold: "
            "start a new run, with start_from a folder that `terakoya export` writes of this one to continue from here"
        )
    previous = manifest["stores"]
    if "data" not in allow_change and _training_fingerprints(before, previous) != _training_fingerprints(
        now, fingerprints
    ):
        others = [key for key in refused if not key.startswith("data.")]
        raise UserError(
            "the token stores are not the ones this run was started with"
            + (f", nor are the values of {', '.join(others)}" if others else "")
            + "; start a new run, or continue with "
            + " ".join(f"--allow-change {key}" for key in ("data", *others))
        )
    if refused:
        raise UserError(
            f"the run was started with other values of {', '.join(refused)}; start a new run, or continue with "
            + " ".join(f"--allow-change {key}" for key in refused)
        )
    validated = {previous[name] for name in previous.keys() - _training_stores(before)}
    for name in sorted(fingerprints.keys() - _training_stores(now)):
        if fingerprints[name] not in validated:
            run_log.warn(f"{name}: the run has not validated on this store before; its losses start a new curve")


def _changed_validation(
    changed: Sequence[str],
    manifest: Mapping[str, Any],
    parameters: Parameters,
    fingerprints: Mapping[str, str],
    allow_change: frozenset[str],
) -> list[str]:
    """Returns the keys of validation that have changed: losses on other rows, or at other steps, are not those that the
    schedule has followed so far."""
    keys = [key for key in (*EVALUATION, "data.validation") if key in changed]
    before, now = manifest["stores"], parameters.dump()
    old = sorted(before[name] for name in before.keys() - _training_stores(_with_defaults(manifest["parameters"])))
    new = sorted(fingerprints[name] for name in fingerprints.keys() - _training_stores(now))
    if old != new and "data.validation" not in keys:
        keys.append("data.validation")
    if old == new and "data.validation" in keys:
        keys.remove("data.validation")  # the same stores in another place
    return [key for key in keys if not any(key == name or key.startswith(f"{name}.") for name in allow_change)]


def _training_stores(parameters: Mapping[str, Any]) -> set[str]:
    """Returns the folders of the stores that a run with these parameters trains on."""
    stages: list[Mapping[str, Any]] = [parameters["data"], *parameters["data"].get("stages", ())]
    return {entry["store"] for stage in stages for entry in stage["train"]}


def _training_fingerprints(parameters: Mapping[str, Any], fingerprints: Mapping[str, str]) -> list[str]:
    """Returns the fingerprints of those stores that the run trains on, in no particular order of the stores."""
    return sorted(fingerprints[name] for name in _training_stores(parameters) if name in fingerprints)


def _with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest's parameters, with the defaults of settings that did not exist when they were written."""
    with contextlib.suppress(UserError):
        return Parameters.from_dict(written, source="manifest.json").dump()
    return written

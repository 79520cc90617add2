"""Continues a run: finds its newest checkpoint, checks what has changed since, and sets the trainer to its step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya.config import lora as lora_settings
from terakoya.config.parameters import RESUME_MAY_CHANGE, Parameters, changed_keys
from terakoya.errors import UserError
from terakoya.json_settings import leaves
from terakoya.plugins.run_record import check_plugins
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.restoring import check_base_unchanged
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.model import lora
from terakoya.training.run_log import RunLog
from terakoya.training.trainer import Trainer


def newest_checkpoint(out: Path, context: DistributedContext, run_log: RunLog) -> Path | None:
    """Returns the newest intact checkpoint of the run in `out`, from which it continues; None without one."""
    found: tuple[Path | None, list[str]] = (None, [])
    if context.is_main:
        found = checkpoint.recover_newest(out / "checkpoints")
    folder, messages = context.broadcast(found)
    for message in messages:
        run_log.warn(message)
    return folder


def resume(trainer: Trainer, folder: Path, allow_change: frozenset[str]) -> None:
    """Sets `trainer` to the step of the checkpoint `folder` of its run.

    Raises:
        UserError: parameters, data or plugins have changed, and the change was not allowed.
    """
    run, run_log = trainer.run, trainer.run_log
    manifest = checkpoint.read_manifest(folder)
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
    checkpoint_state.load(folder, trainer.engine)
    run.step = manifest["step"]
    run.consumed_rows = manifest["consumed_rows"]
    run.consumed_tokens = manifest["consumed_tokens"]
    run.validation_losses = tuple((step, loss) for step, loss in manifest.get("validation_losses", ()))
    _restore_data_order(trainer, manifest, folder)
    trainer.restore_meters(manifest["meters"])
    if trainer.engine.scaler is not None and manifest.get("loss_scaling") is not None:
        trainer.engine.scaler.load(manifest["loss_scaling"])
    trainer.last_checkpoint, trainer.saver.step = folder, run.step
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
    old, new = dict(leaves(before)), dict(leaves(now))
    for key in changed:
        run_log.print(f"parameter {key}: was {old.get(key)!r}, is {new.get(key)!r}")
    allowed = RESUME_MAY_CHANGE | allow_change
    refused = [key for key in changed if not any(key == name or key.startswith(f"{name}.") for name in allowed)]
    fixed = [key for key in changed if key.partition(".")[0] == lora.KEY and key not in lora_settings.CHANGEABLE]
    if fixed:
        raise UserError(
            f"the run was started with other values of {', '.join(fixed)}, which determine what its checkpoints hold: "
            "start a new run, with start_from a folder that `terakoya export` writes of this one to continue from here"
        )
    if refused:
        raise UserError(
            f"the run was started with other values of {', '.join(refused)}; start a new run, or continue with "
            + " ".join(f"--allow-change {key}" for key in refused)
        )
    if "data" not in allow_change and sorted(manifest["stores"].values()) != sorted(fingerprints.values()):
        raise UserError(
            "the token stores are not the ones this run was started with; continue with --allow-change data"
        )


def _with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest's parameters, with the defaults of settings that did not exist when they were written."""
    with contextlib.suppress(UserError):
        return Parameters.from_dict(written, source="manifest.json").dump()
    return written

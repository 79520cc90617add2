"""A run that goes on: its newest whole checkpoint, what may have changed since, and taking it over."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya.config import lora as lora_settings
from terakoya.config.parameters import RESUME_MAY_CHANGE, Parameters, changed_keys
from terakoya.errors import UserError
from terakoya.json_settings import leaves
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.restoring import check_base
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.model import lora
from terakoya.training.run_log import RunLog
from terakoya.training.trainer import Trainer


def newest_checkpoint(out: Path, context: DistributedContext, run_log: RunLog) -> Path | None:
    """The newest whole checkpoint of the run in `out`, which it goes on from; None if it has none."""
    found: tuple[Path | None, list[str]] = (None, [])
    if context.is_main:
        found = checkpoint.recover_newest(out / "checkpoints")
    folder, said = context.broadcast(found)
    for text in said:
        run_log.warn(text)
    return folder


def resume(trainer: Trainer, folder: Path, allow_change: frozenset[str]) -> None:
    """Puts `trainer` where the checkpoint `folder` of its run stands.

    Raises:
        UserError: parameters, data or plugins are not what they were and the change was not allowed.
    """
    run, run_log = trainer.run, trainer.run_log
    manifest = checkpoint.read_manifest(folder)
    _refuse_changes(manifest, run.parameters, trainer.facts, run_log, allow_change)
    lacking = trainer.registry.check_record(manifest["plugins"], run.parameters.dump())
    if lacking.missing:
        raise UserError(f"{folder}: " + "; ".join(lacking.missing))
    for text in lacking.changed:
        run_log.warn(text)
    if run.parameters.lora is None:
        trainer.facts = {**trainer.facts, "started_from": manifest.get("started_from")}
    else:  # the folder may lie elsewhere now: with leave, and as it was
        check_base(trainer.facts["started_from"], manifest.get("started_from"))
    checkpoint_state.load(folder, trainer.engine)
    run.step = manifest["step"]
    run.consumed_rows = manifest["consumed_rows"]
    run.consumed_tokens = manifest["consumed_tokens"]
    run.validation_losses = tuple((step, loss) for step, loss in manifest.get("validation_losses", ()))
    _keep_the_order(trainer, manifest, folder)
    trainer.restore_meters(manifest["meters"])
    if trainer.engine.scaler is not None and manifest.get("loss_scaling") is not None:
        trainer.engine.scaler.load(manifest["loss_scaling"])
    trainer.last_checkpoint, trainer.saver.step = folder, run.step
    run_log.write("resume", step=run.step, folder=folder.name, world_size=run.world_size)
    run_log.print(f"resumed from {folder} at step {run.step:,}")


def _keep_the_order(trainer: Trainer, manifest: Mapping[str, Any], folder: Path) -> None:
    """Lets the next step begin with the row after the last one used.

    Raises:
        UserError: the global batch is another than before.
    """
    run, now = trainer.run, trainer.rank_batch.global_rows
    before = sum(manifest["parameters"]["batch_size"].values())
    if before != now:
        raise UserError(
            f"{folder}: {run.consumed_rows:,} rows were used in {run.step:,} steps of {before}, but batch_size is now "
            f"{now}: keep the global batch"
        )
    trainer.batches.begin(run.step, run.consumed_rows)
    run.length = run.length.after_resuming(step=run.step, consumed_rows=run.consumed_rows, global_rows=now)
    trainer.facts = {**trainer.facts, "max_steps": run.length.steps}
    if run.consumed_rows != run.step * now and not run.finished:
        trainer.run_log.warn(
            f"the last of the {run.step:,} steps before held fewer rows than the others, as the run was to end with "
            "it: steps from here on are not those of a run that was longer from the beginning"
        )


def _refuse_changes(
    manifest: Mapping[str, Any],
    parameters: Parameters,
    facts: Mapping[str, Any],
    run_log: RunLog,
    allow_change: frozenset[str],
) -> None:
    before, now = _with_defaults(manifest["parameters"]), parameters.dump()
    changed = changed_keys(before, now)
    old, new = dict(leaves(before)), dict(leaves(now))
    for key in changed:
        run_log.print(f"parameter {key}: was {old.get(key)!r}, is {new.get(key)!r}")
    allowed = RESUME_MAY_CHANGE | allow_change
    refused = [key for key in changed if not any(key == each or key.startswith(f"{each}.") for each in allowed)]
    other = [key for key in changed if key.partition(".")[0] == lora.KEY and key not in lora_settings.CHANGEABLE]
    if other:
        raise UserError(
            f"the run was started with other values of {', '.join(other)}, which say what its checkpoints hold: start "
            "a new run, from a folder that `terakoya export` makes of this one if it is to go on from here"
        )
    if refused:
        raise UserError(
            f"the run was started with other values of {', '.join(refused)}; start a new run, or go on with "
            + " ".join(f"--allow-change {key}" for key in refused)
        )
    if "data" not in allow_change and sorted(manifest["stores"].values()) != sorted(facts["stores"].values()):
        raise UserError("the token stores are not the ones this run was started with; go on with --allow-change data")


def _with_defaults(written: dict[str, Any]) -> dict[str, Any]:
    """A manifest's parameters with those settings at their defaults that did not exist when it was written."""
    with contextlib.suppress(UserError):
        return Parameters.from_dict(written, source="manifest.json").dump()
    return written

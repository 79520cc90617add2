"""Forks a run: a new run folder that begins at a checkpoint of another run, with its optimizer state and data position.

    NEW/fork.json                      the parent: run, step, hash of the manifest, and what was changed
        parameters.json                the parent's at that step, with the changes
        metrics.jsonl                  one record, `fork`
        checkpoints/step-00008000/     the parent's checkpoint, file by file

The files of the checkpoint are linked: a fork takes no space and no time, and each file stays as long as one of its
names does, so the parent may remove its checkpoint, or be removed whole. No program of terakoya changes a file of a
checkpoint. Where the file system has no links, files are copied.

See docs/design/forks.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terakoya.atomic_files import FileFacts, check_new_folder, new_folder
from terakoya.components.vocabulary import Vocabulary
from terakoya.config import batch_table
from terakoya.config.parameters import Parameters, changed_keys
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.plugins.run_record import check_plugins
from terakoya.rows.stores import Stores
from terakoya.runs import metrics
from terakoya.runs.checkpoints import MANIFEST, find_problems, folder_name, read_manifest
from terakoya.runs.finding import PERMANENT, find_checkpoint
from terakoya.runs.forks import Fork, write_fork
from terakoya.toolkit.checkpoint_copies import link_file
from terakoya.training.resuming.changes import check_vocabulary, needed_consent
from terakoya.training.run_plan import make_plan

MODEL = ("architecture", "objective")
"""The sections of the parameters that decide which tensors a model has."""
PLAN = ("max_steps", "max_tokens", "batch_size", "data", "seed", "objective", "phases")
"""The sections that decide at which steps and rows phases begin."""


def fork(source: Path, out: Path, overrides: Sequence[str] = ()) -> Fork:
    """Makes the folder `out` of a run that continues from a checkpoint of another run, with changed parameters.

    What is changed is what `terakoya train --allow-change` would take there; `overrides` are the changes,
    `KEY=VALUE`. A process that is killed leaves no `out`, or a whole one.

    Args:
        source: RUN for its newest whole checkpoint, RUN@STEP, or the folder of a checkpoint.

    Returns:
        what the new run knows of its parent.

    Raises:
        UserError: there is no such checkpoint, it is damaged, a change is one that a run cannot take, nothing is left
            to train, or `out` already exists.
    """
    check_new_folder(out)
    folder = find_checkpoint(source)
    manifest = read_manifest(folder)
    place = f"{folder}/{MANIFEST}"
    before = Parameters.from_dict(manifest["parameters"], source=place)
    nodes = len(before.batch_size)  # of a new table {"*": ROWS}
    parameters = Parameters.from_dict(manifest["parameters"], source=place, overrides=overrides, nodes=nodes)
    fork = Fork(
        run=str(_run_of(folder).resolve()),
        step=manifest["step"],
        manifest=FileFacts.of(folder / MANIFEST).sha256,
        changed=tuple(_check_changes(folder, manifest, before, parameters)),
    )
    record = {
        "kind": "fork", "step": fork.step, "time": round(time.time(), 3), "tokens": manifest["consumed_tokens"],
        **fork.model_dump(mode="json", exclude={"step"}),
    }  # fmt: skip
    with new_folder(out) as draft:
        checkpoint = draft / "checkpoints" / folder_name(fork.step)
        _link_checkpoint(folder, manifest, checkpoint)
        write_fork(draft, fork)
        text = json.dumps(parameters.dump(), indent=2, ensure_ascii=False)
        (draft / "parameters.json").write_text(text + "\n", encoding="utf-8")
        (draft / metrics.FILE).write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    return fork


def _run_of(checkpoint: Path) -> Path:
    """Returns the folder of the run of a checkpoint: the one above `checkpoints/` or `permanent/`, or above
    `model-best`."""
    above = checkpoint.absolute().parent
    return above.parent if above.name in ("checkpoints", PERMANENT) else above


def _link_checkpoint(source: Path, manifest: Mapping[str, Any], target: Path) -> None:
    """Makes `target` the checkpoint `source`, with the files that its manifest names.

    Raises:
        UserError: the run has removed the checkpoint meanwhile.
        OSError: a file can be neither linked nor copied.
    """
    try:
        for name in (*manifest["files"], MANIFEST):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            link_file(source / name, target / name)
    except FileNotFoundError:
        raise UserError(
            f"{source}: its run removed this checkpoint just now; fork a later one, or raise checkpoint.keep of the run"
        ) from None
    problems = find_problems(target, hashed=())
    assert not problems, problems


def _check_changes(folder: Path, manifest: Mapping[str, Any], before: Parameters, now: Parameters) -> list[str]:
    """Returns the keys of `now` that a resume from the checkpoint `folder` would take with `--allow-change` only.

    Raises:
        UserError: a run cannot take a change at a checkpoint, or is finished with it.
    """
    if missing := check_plugins(registry(), manifest["plugins"], now.dump()).missing:
        raise UserError(f"{folder}: " + "; ".join(missing))
    rows = sum(before.batch_size.values()), sum(now.batch_size.values())
    if rows[0] != rows[1]:
        raise UserError(
            f"batch_size: expected {rows[0]} rows a step, as in the checkpoint, got {rows[1]}: a run counts its data "
            "in steps of one size; divide them otherwise among nodes, or start a new run from an export of this one"
        )
    if before.start_from != now.start_from and now.trained_beside is None:  # else the base is looked for there
        raise UserError(
            "start_from: cannot change in a fork, which continues with the weights and the optimizer's state of its "
            f"checkpoint; start a new run with start_from the folder of `terakoya export {folder} --out MODEL`"
        )
    if now.max_steps is not None and now.max_steps <= manifest["step"]:
        raise UserError(
            f"max_steps: expected more than the {manifest['step']:,} steps of the checkpoint, got {now.max_steps:,}: "
            "nothing would be left to train; raise it with --set max_steps=N"
        )
    if now.max_tokens is not None and now.max_tokens <= manifest["consumed_tokens"]:
        raise UserError(
            f"max_tokens: expected more than the {manifest['consumed_tokens']:,} tokens of the checkpoint, got "
            f"{now.max_tokens:,}: nothing would be left to train; raise it with --set max_tokens=N"
        )
    fingerprints: Mapping[str, str] = manifest["stores"]
    changed = {key.partition(".")[0] for key in changed_keys(before, now)}
    if before.data != now.data or before.phases != now.phases:
        stores = Stores.of_run(now)
        fingerprints = stores.fingerprints()
        check_vocabulary(folder, stores)
    if now.phases and not changed.isdisjoint(PLAN):
        _check_phases(manifest, now)
    if before.trained_beside is None and not changed.isdisjoint(MODEL):
        _check_tensors(folder, now, Vocabulary.model_validate(manifest["vocabulary"]))
    return needed_consent(manifest, now, fingerprints)


def _check_phases(manifest: Mapping[str, Any], parameters: Parameters) -> None:
    """Raises UserError if the phases of `parameters` took other steps or rows before the checkpoint of `manifest`."""
    stores = Stores.of_run(parameters)
    hosts = batch_table.node_names(parameters.batch_size)
    nodes = Topology(tuple(ProcessInfo(node, node, 0, host) for node, host in enumerate(hosts)))
    plan = make_plan(parameters, stores, nodes, 0)
    plan.check_borders(manifest)
    plan.continued_at(manifest["step"], manifest["consumed_rows"])


def _check_tensors(folder: Path, parameters: Parameters, vocabulary: Vocabulary) -> None:
    """Raises UserError if the model of `parameters` has other tensors than the checkpoint `folder`."""
    import torch  # here: most forks need no model

    from terakoya.training.checkpoint import state as checkpoint_state
    from terakoya.training.model.build import build_module
    from terakoya.training.model.module_parts import saved_values

    with torch.device("meta"):
        module = build_module(parameters, vocabulary)
    shapes = {name: tuple(value.shape) for name, value in saved_values(module)}
    checkpoint_state.check_shapes(folder, shapes)
    if other := sorted(shapes.keys() ^ checkpoint_state.SavedState(folder, "model").names()):
        raise UserError(
            f"architecture, objective: the model would have other weights than the checkpoint ({other[0]}"
            f"{', ...' if len(other) > 1 else ''}): a run cannot change the sizes of its model; leave them as they were"
        )

"""Writes checkpoints that are complete or absent: staged, hashed, described by a manifest, then renamed into place.

    RUN/checkpoints/step-00001000/manifest.json   facts about the run, the size and SHA-256 of every file, and its own
                                  state/          fp32 parameters and optimizer state: what a resumed run reads
                                  model/          a Transformers folder, never read by resume
                                  adapter/        with `lora` the adapters in peft's format, never read by resume
                                  tokenizer/

Every rank writes, flushes and hashes its own shards of `state/` (see `state.py`); rank 0 writes everything else.
Tensors are safetensors, everything else JSON; nothing is ever unpickled. Reading: `terakoya.runs.checkpoints`.

See docs/design/checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from terakoya.atomic_files import FileFacts, commit_folder, copy_folder
from terakoya.distributed.all_ranks import Shutdown, run_on_all_ranks
from terakoya.distributed.context import DistributedContext
from terakoya.errors import UserError
from terakoya.runs.checkpoints import (
    FORMAT,
    KEEP_BEFORE,
    MANIFEST,
    find_conflict,
    find_problems,
    folder_name,
    list_checkpoints,
    with_hash,
)
from terakoya.training.checkpoint import event_tensors as event_tensors_files
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.event_tensors import EventTensors
from terakoya.training.checkpoint.state import ShardSource, WrittenState

log = logging.getLogger("terakoya")
MINIMUM_KEPT = 2
"""Pruning keeps at least so many checkpoints."""
SHOWN_TENSORS = 3


@dataclass(frozen=True)
class Place:
    """Where a run saves its checkpoints.

    Attributes:
        checkpoints: the folder of that name in the run's.
        tokenizer_folder: is copied into each of them.
        keep: how many of them stay, at least `MINIMUM_KEPT`.
        shutdown: set when this process is about to leave and must abandon a save.
        before_commit: called on rank 0 when all of a checkpoint is written, before it gets its name.
    """

    checkpoints: Path
    tokenizer_folder: Path
    keep: int
    shutdown: threading.Event = field(default_factory=threading.Event)
    before_commit: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds.

    Attributes:
        facts: JSON values of the manifest, apart from its files.
        source: the engine, or a snapshot of its state: the shards that this process writes.
        event_tensors: what this process has of the tensors of event plugins.
        write_models: called on rank 0 with the staging folder, whose `state/` is complete: writes the folders that
            other programs read.
        keep_before: a step to which the run may go back: the newest checkpoint up to it stays, too.
    """

    facts: Mapping[str, Any]
    source: ShardSource
    event_tensors: EventTensors
    write_models: Callable[[Path], None]
    keep_before: int | None = None


def save(place: Place, step: int, context: DistributedContext, content: Content) -> Path:
    """Writes and commits the checkpoint of `step`, then prunes old ones; returns its folder. Collective: all ranks
    return together.

    Raises:
        FileError: on every rank, if the disk refused something on any; committed checkpoints are not touched.
        UserError: on every rank, if a number of the model or of the optimizer's state is not finite.
        Shutdown: `place.shutdown` is set.
    """
    checkpoints, keep_before = place.checkpoints, content.keep_before
    staging = checkpoints / f".staging-{folder_name(step)}"
    final = checkpoints / folder_name(step)

    def begin() -> None:
        if context.is_main:
            if staging.is_symlink() or staging.is_file():
                staging.unlink()
            shutil.rmtree(staging, ignore_errors=True)
            (staging / "state").mkdir(parents=True)

    def write() -> tuple[WrittenState, dict[str, Any]]:
        state = checkpoint_state.write(staging / "state", context.rank, content.source)
        return state, event_tensors_files.write(staging, context.rank, content.event_tensors)

    def finish(written: Mapping[str, Any]) -> None:
        if context.is_main:
            incomplete = checkpoint_state.incomplete_tensors(staging)
            assert not incomplete, f"{incomplete[:5]} were not written once: processes do not agree who writes what"
            event_tensors_files.check_whole(staging, written)
            content.write_models(staging)
            copy_folder(place.tokenizer_folder, staging / "tokenizer")
            if place.shutdown.is_set():
                raise Shutdown  # another process may hold the run's lock by now
            place.before_commit()
            facts = {"format": FORMAT, "step": step, KEEP_BEFORE: keep_before, **content.facts}
            _commit(staging, final, facts, written)
            try:
                prune(checkpoints, place.keep, keep_before=keep_before)
            except OSError as error:  # the checkpoint is there all the same
                log.warning("old checkpoints could not be removed (%s); the next start removes them", error.strerror)

    on_all_ranks = partial(run_on_all_ranks, context, f"saving {final}", shutdown=place.shutdown)
    try:
        on_all_ranks(begin)
        ranks = on_all_ranks(write)
        _refuse_not_finite(step, sorted({name for rank, _ in ranks for name in rank.not_finite}), checkpoints)
        written = {f"state/{name}": facts for rank, _ in ranks for name, facts in rank.files.items()}
        written |= {name: facts for _, files in ranks for name, facts in files.items()}
        on_all_ranks(lambda: finish(written))
    except UserError:
        if context.is_main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def _refuse_not_finite(step: int, names: Sequence[str], checkpoints: Path) -> None:
    """Raises UserError if there are `names` of tensors that hold a NaN or an infinity: a run could not continue from
    them, and no program could use the model."""
    if not names:
        return
    shown = ", ".join(names[:SHOWN_TENSORS]) + (", ..." if len(names) > SHOWN_TENSORS else "")
    older = list_checkpoints(checkpoints)
    raise UserError(
        f"step {step}: {len(names)} tensors of the model or of the optimizer's state hold numbers that are not finite "
        f"({shown}): an update went wrong, and this step is not saved. "
        + (
            f"{older[-1][1].name}, from before, stays: the same command continues from it"
            if older
            else "Nothing was saved before: the same command starts again"
        )
        + ". Lower optimizer.learning_rate first"
        + (" (--allow-change optimizer.learning_rate)" if older else "")
    )


def _commit(staging: Path, final: Path, facts: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Writes the manifest of all files, `written` and others, last; flushes all to disk and renames `staging`."""
    files = dict(written)
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_file() and name not in files:
            files[name] = FileFacts.of(path).model_dump()
    manifest = staging / MANIFEST
    content = with_hash({**facts, "files": dict(sorted(files.items()))})
    conflict = find_conflict(final.name, content)
    assert conflict is None, conflict
    text = json.dumps(content, indent=1, ensure_ascii=False)
    manifest.write_text(text, encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)  # an older save of the same step, from before a resume at an earlier one
    commit_folder(staging, final, flushed={staging / name for name in written})


def prune(checkpoints: Path, keep: int, *, keep_before: int | None = None) -> None:
    """Removes all but the newest `keep` checkpoints.

    With `keep_before`, also keeps the newest one up to that step, and those after it. Always keeps `MINIMUM_KEPT`
    checkpoints whose files have the right sizes, so that a damaged checkpoint is never the only one that remains.
    Removes none while one of them cannot be read.
    """
    try:
        sound = [each for each in list_checkpoints(checkpoints) if not find_problems(each[1], hashed=())]
    except UserError as error:
        log.warning("no old checkpoint is removed: %s", error)
        return
    kept = sound[-max(keep, MINIMUM_KEPT) :]
    if len(kept) < MINIMUM_KEPT:
        return
    oldest, _ = kept[0]
    if keep_before is not None:
        oldest = max((step for step, _ in sound if step <= min(oldest, keep_before)), default=sound[0][0])
    for step, path in list_checkpoints(checkpoints):
        if step < oldest:
            remove_checkpoint(path)


def remove_checkpoint(folder: Path) -> None:
    """Removes the checkpoint `folder`; raises OSError."""
    removing = folder.with_name(f".removing-{folder.name}")
    folder.rename(removing)  # a half removed folder must not have the name of a checkpoint
    shutil.rmtree(removing)

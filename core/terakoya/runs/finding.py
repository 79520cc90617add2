"""Finds the checkpoint that a command names: RUN for its newest whole one, RUN@STEP for one of them, or its folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found, kind_of
from terakoya.places import is_local, place_of
from terakoya.runs.checkpoints import (
    ALL_FILES,
    MANIFEST,
    RemovedError,
    find_newest_whole,
    find_problems,
    folder_name,
    list_checkpoints,
    while_kept,
)

log = logging.getLogger("terakoya")
PERMANENT = "permanent"
"""The folder of a run in which the event plugin `permanent_checkpoints` keeps some of its checkpoints."""


def find_checkpoint(source: Path, *, hashed: Sequence[str] = ALL_FILES) -> Path:
    """Returns `source` if it is a checkpoint, that of a step of a run if it is RUN@STEP, or the newest whole checkpoint
    of the run `source`; warns about newer ones that are damaged. Of a run in another place it is copied to this machine
    first. `hashed` is as for `find_problems`.

    Raises:
        UserError: there is no whole checkpoint, or it cannot be read now.
        TemporaryFailure: the run removed the checkpoint while it was read.
    """
    source = place_of(source).checkpoint()
    if not source.exists() and "@" in source.name:
        source = _at_step(source)
    if not (source / "checkpoints").is_dir() and (source / MANIFEST).is_file():
        with while_kept(source):
            if problems := find_problems(source, hashed=hashed):
                raise UserError(f"{source}: damaged: {'; '.join(problems[:5])}")
        return source
    newest, damaged = find_newest_whole(source / "checkpoints", hashed=hashed)
    there = {folder: problems for folder, problems in damaged.items() if folder.exists()}
    skipped = [f"{folder}: damaged: {'; '.join(problems[:5])}" for folder, problems in there.items()]
    if newest is None and there != damaged:
        raise RemovedError(next(folder for folder in damaged if folder not in there))
    if newest is None:
        if kind_of(source) != "run":
            found = describe_found(source, "run")
            if not source.exists():
                raise UserError(f"{source}: expected a run or a checkpoint, got {found}")
            raise UserError(f"{source}: expected a run or a checkpoint, found no checkpoint in {found}")
        reason = "\n".join(skipped) or "found no checkpoint in it; train it first"
        raise UserError(f"{source}: expected a run with a whole checkpoint, or a checkpoint; {reason}")
    for line in skipped:
        log.warning("%s; taking %s instead", line, newest.name)
    return newest


def names_checkpoint(source: Path) -> bool:
    """Returns whether `source` is what `find_checkpoint` takes: a run, RUN@STEP, a checkpoint, or a run elsewhere.
    All else is for those that read a Transformers folder."""
    is_step = not source.exists() and "@" in source.name
    return not is_local(source) or is_step or (source / "checkpoints").is_dir() or (source / MANIFEST).is_file()


def _at_step(source: Path) -> Path:
    """Returns the folder of the checkpoint that RUN@STEP names. Raises UserError where there is none."""
    name, _, step = source.name.rpartition("@")
    run = source.with_name(name) if name else source.parent
    if not (step.isdecimal() and step.isascii()):
        raise UserError(f"{source}: expected the step of a checkpoint after @, got {step!r}; for example {run}@1000")
    if kind_of(run) != "run":
        raise UserError(f"{run}: expected a run, got {describe_found(run, 'run')}")
    folders = [run / place / folder_name(int(step)) for place in ("checkpoints", PERMANENT)]
    if (found := next((folder for folder in folders if folder.is_dir()), None)) is not None:
        return found
    steps = sorted({each for place in ("checkpoints", PERMANENT) for each, _ in list_checkpoints(run / place)})
    there = f"its checkpoints are of {', '.join(f'{each:,}' for each in steps)}" if steps else "it has no checkpoint"
    raise UserError(f"{source}: no checkpoint of step {int(step):,}; {there}")

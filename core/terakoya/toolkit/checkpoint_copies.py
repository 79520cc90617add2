"""Copies of checkpoints that stay when the run removes old ones: the files are linked, so that a copy takes no space
while the checkpoint itself is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from terakoya.errors import UserError


def check_every(every: int, parameters: Any) -> None:
    """Raises UserError where not every `every`th step of a run with these `parameters` has a checkpoint."""
    save_steps = parameters.checkpoint.save_steps
    if every % save_steps:
        raise UserError(f"every: expected a multiple of checkpoint.save_steps, {save_steps}; got {every}")


def copy_checkpoint(source: Path, target: Path, *, more: Mapping[str, str] | None = None) -> None:
    """Makes the folder `target` a copy of the checkpoint `source`, in place of what it was before. Raises OSError if a
    file cannot be linked or written; the old copy is still there.

    Files are linked; where the file system has no links they are copied. A process that is killed leaves the old copy
    or the new one: `finish_copy` finds it. `more` are texts to write into the copy, by file name.
    """
    draft, old = _beside(target, "new"), _beside(target, "old")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        for folder, _, names in os.walk(source):
            into = draft / Path(folder).relative_to(source)
            into.mkdir(parents=True)
            for name in names:
                link_file(Path(folder, name), into / name)
        for name, text in (more or {}).items():
            (draft / name).write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def link_file(source: Path, target: Path) -> None:
    """Makes `target` another name of the file `source`; a copy where the file system has no links. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def finish_copy(target: Path) -> None:
    """Cleans up after a process that was killed in `copy_checkpoint`: `target` is the old copy or the new one."""
    if not target.exists():
        with suppress(FileNotFoundError):
            _beside(target, "old").rename(target)
    for left in (_beside(target, "new"), _beside(target, "old")):
        shutil.rmtree(left, ignore_errors=True)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{what}-{target.name}")

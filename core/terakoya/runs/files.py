"""Reads a run's folder while another process may write to it: lock, checkpoints, parameters."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.atomic_files import take_lock
from terakoya.runs.checkpoints import MANIFEST, NAME

MACHINE_FILES = ("run.lock", "save.request", "place.json")
"""Files of a run's folder that say something about this machine alone: they are not copied elsewhere."""
STAGING = re.compile(r"\.staging-step-(\d{8,})")


@dataclass(frozen=True)
class Lock:
    """The state of `run.lock`.

    Attributes:
        held: whether a process holds the lock and so trains. The system releases it when the process dies.
        holder: the text in the file, which names the last process that took the lock; "" if none did.
        since: when that process took the lock, in seconds since 1970; None if none did.
    """

    held: bool
    holder: str
    since: float | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint, and when it was committed, in seconds since 1970."""

    folder: Path
    step: int
    time: float


def read_lock(folder: Path) -> Lock:
    """Returns the state of the run's lock. Holds the lock for an instant; a process that wants it then tries again."""
    file = folder / "run.lock"
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:
        return Lock(False, "", None)
    try:
        take_lock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB, file)
        held = False
    except BlockingIOError:
        held = True
    finally:
        os.close(handle)
    return Lock(held, file.read_text(encoding="utf-8").strip(), file.stat().st_mtime)


def find_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Returns the committed checkpoints of the run in `folder`, oldest first."""
    checkpoints = []
    for path in _list_folder(folder / "checkpoints"):
        match = NAME.fullmatch(path.name)
        manifest = path / MANIFEST
        if match and manifest.is_file():
            checkpoints.append(SavedCheckpoint(path, int(match[1]), manifest.stat().st_mtime))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def saving_step(folder: Path) -> int | None:
    """Returns the step of the checkpoint that is being written, or was when the process died; None if there is none."""
    names = [path.name for path in _list_folder(folder / "checkpoints")]
    return max((int(match[1]) for name in names if (match := STAGING.fullmatch(name))), default=None)


def read_parameters(folder: Path) -> Mapping[str, Any]:
    """Returns `parameters.json` as plain JSON; empty if the file is missing or not JSON."""
    return read_object(folder / "parameters.json")


def read_manifest(checkpoint: Path) -> Mapping[str, Any]:
    """Returns the manifest of the folder `checkpoint`; empty if it is damaged or was pruned in the meantime."""
    return read_object(checkpoint / MANIFEST)


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if the file is missing or holds something else."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

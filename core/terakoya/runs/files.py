"""What lies in a run's folder, read from outside while another process may write: lock, checkpoints, parameters."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINT = re.compile(r"step-(\d{8,})")
STAGING = re.compile(r"\.staging-step-(\d{8,})")


@dataclass(frozen=True)
class Lock:
    """The state of `run.lock`.

    Attributes:
        held: whether a process holds it, and so trains. The system lets go of it when the process dies.
        holder: who took it last, in the words of the file; "" if nobody did.
        since: when, in seconds since 1970; None if nobody did.
    """

    held: bool
    holder: str
    since: float | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint, and when it was."""

    folder: Path
    step: int
    time: float


def lock(folder: Path) -> Lock:
    """The lock of the run in `folder`. Looks for an instant; who takes the lock then tries again."""
    file = folder / "run.lock"
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:
        return Lock(False, "", None)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        held = False
    except BlockingIOError:
        held = True
    finally:
        os.close(handle)
    return Lock(held, file.read_text(encoding="utf-8").strip(), file.stat().st_mtime)


def checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """The committed checkpoints of the run in `folder`, oldest first."""
    found = []
    for path in _inside(folder / "checkpoints"):
        match = CHECKPOINT.fullmatch(path.name)
        manifest = path / "manifest.json"
        if match and manifest.is_file():
            found.append(SavedCheckpoint(path, int(match[1]), manifest.stat().st_mtime))
    return sorted(found, key=lambda each: each.step)


def saving(folder: Path) -> int | None:
    """The step whose checkpoint is being written, or was when the process died; None if there is none."""
    steps = [int(match[1]) for path in _inside(folder / "checkpoints") if (match := STAGING.fullmatch(path.name))]
    return max(steps, default=None)


def parameters(folder: Path) -> Mapping[str, Any]:
    """`parameters.json` as plain JSON; empty where there is none yet or it is no JSON."""
    return _object(folder / "parameters.json")


def manifest(checkpoint: SavedCheckpoint) -> Mapping[str, Any]:
    """The manifest of `checkpoint`; empty where it is damaged, or pruned by now."""
    return _object(checkpoint.folder / "manifest.json")


def _object(file: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

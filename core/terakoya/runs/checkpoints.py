"""A run's checkpoints as their files describe them: their names, their manifests, and whether they are whole.

A checkpoint is in one of three states:

    whole               every file that its manifest names has the size and the SHA-256 written there
    damaged             a file is missing or changed, or the manifest is not the one that was written
    cannot be read now  the file system fails, or a newer version of terakoya wrote the checkpoint

Damage is returned, as lines for the user. What cannot be read now is raised: it is not damage.

See docs/design/checkpoints.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from terakoya.atomic_files import FileFacts
from terakoya.errors import TemporaryFailure, UserError
from terakoya.log import plural

FORMAT = 3
HASH_KEY = "sha256"
"""The manifest's key for the SHA-256 of its other values."""
MANIFEST = "manifest.json"
KEEP_BEFORE = "keep_before"
"""The manifest's key of the step to which its run may go back, so that the newest checkpoint up to it stays, too; null
where it does not go back."""
NAME = re.compile(r"step-(\d{8,})")
HASHING_THREADS = 8
ALL_FILES = ("",)


class DamagedError(UserError):
    """A checkpoint's manifest is missing, or is not the one that was written."""


def folder_name(step: int) -> str:
    """Returns the name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of the checkpoints under their final names, oldest first; skips links and other files.
    Raises TemporaryFailure if the folder `checkpoints` cannot be read now."""
    with reading(checkpoints):
        try:
            entries = list(os.scandir(checkpoints))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            (int(match[1]), checkpoints / entry.name)
            for entry in entries
            if (match := NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError of the block, which reads `path`, into a TemporaryFailure; a link to itself into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{error.filename or path}: {error.strerror}") from error
        raise TemporaryFailure(
            f"{error.filename or path}: cannot be read now: {error.strerror or error}; that is no sign of damage"
        ) from error


@contextmanager
def while_kept(folder: Path) -> Iterator[None]:
    """Turns an error of the block, which reads the checkpoint `folder`, into a TemporaryFailure where the run has
    removed the checkpoint meanwhile: what is missing then says nothing of the checkpoint."""
    try:
        yield
    except (OSError, UserError, RuntimeError) as error:  # the last of safetensors, where it cannot open a file
        if folder.exists():
            raise
        raise RemovedError(folder) from error


class RemovedError(TemporaryFailure):
    """The run of the checkpoint `folder`, which trains, has removed it while it was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: was removed by checkpoint.keep of its run while it was read; try again")


# ------------------------------------------------------------------------------------------------------- manifests


class _CheckedFacts(BaseModel):
    """The values of a manifest that decide whether its checkpoint is whole."""

    model_config = ConfigDict(strict=True)

    step: NonNegativeInt
    files: dict[str, FileFacts]


def with_hash(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest with the values `facts`, JSON, and their SHA-256."""
    return {**facts, HASH_KEY: _content_hash(facts)}


def _content_hash(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the values of `manifest`, however a file lays them out."""
    content = json.loads(json.JSONEncoder().encode({key: manifest[key] for key in manifest if key != HASH_KEY}))
    return hashlib.sha256(json.JSONEncoder(sort_keys=True).encode(content).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of the checkpoint `folder`.

    Raises:
        DamagedError: it is missing, or not the one that was written.
        TemporaryFailure: it cannot be read now.
        UserError: a newer version of terakoya wrote it.
    """
    path = folder / MANIFEST
    with reading(path):
        try:
            manifest = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
            raise DamagedError(f"{path}: not a checkpoint's manifest: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise DamagedError(f"{path}: not a checkpoint's manifest: it has no format")
    if manifest.get(HASH_KEY) != _content_hash(manifest):
        raise DamagedError(f"{path}: content changed: it has another SHA-256 than when it was written")
    if manifest["format"] > FORMAT:
        raise UserError(
            f"{path}: has format {manifest['format']}, of a newer version of terakoya; this version reads formats up "
            f"to {FORMAT}. Nothing was moved: continue with the newer version"
        )
    if conflict := find_conflict(folder.name, manifest):
        raise DamagedError(f"{path}: {conflict}")
    return manifest


def trained_length(manifest: Mapping[str, Any]) -> int:
    """Returns the length of the longest rows up to the checkpoint with this `manifest`, in tokens."""
    parameters = manifest["parameters"]
    begun = (parameters.get("phases") or ())[: manifest.get("phase", {"number": 1})["number"]]
    lengths = [(phase.get("data") or {}).get("sequence_length") for phase in begun]
    return max(length or parameters["data"]["sequence_length"] for length in lengths or [None])


def find_conflict(name: str, manifest: Mapping[str, Any]) -> str | None:
    """Returns how the values of `manifest`, in a folder called `name`, contradict each other; None if they do not.

    Each step takes at least one row, also one that the run skips.
    """
    try:
        step = _CheckedFacts.model_validate(dict(manifest)).step
        if (rows := manifest.get("consumed_rows")) is not None and rows < step:
            return f"{rows:,} row{plural(rows)} in {step:,} step{plural(step)}"
    except (ValidationError, TypeError, ValueError) as error:
        return f"not a checkpoint's manifest: {' '.join(str(error).split())[:200]}"
    match = NAME.fullmatch(name)
    return f"is of step {step}, in a folder of step {int(match[1])}" if match and int(match[1]) != step else None


# ------------------------------------------------------------------------------------------------------- checkpoints


def find_problems(folder: Path, *, hashed: Sequence[str] = ALL_FILES) -> list[str]:
    """Returns how the checkpoint `folder` is damaged, a line per problem; none if it is whole. `hashed` is how the
    names of files begin whose contents are read: `model/`, for example, or by default all; of the others only the sizes
    are checked.

    Raises:
        TemporaryFailure: a file cannot be read now.
        UserError: a newer version of terakoya wrote the checkpoint.
    """
    try:
        files = read_manifest(folder)["files"]
    except DamagedError as error:
        return [str(error)]

    def find_problem(name: str) -> str | None:
        path, expected = folder / name, files[name]
        if ".." in Path(name).parts or Path(name).is_absolute():
            return f"{name}: missing"
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                return f"{name}: not a regular file"
            if facts.st_size != expected["size"]:
                return f"{name}: {facts.st_size} bytes, expected {expected['size']}"
            if name.startswith(tuple(hashed)) and FileFacts.of(path).model_dump() != expected:
                return f"{name}: content changed"
        except (FileNotFoundError, NotADirectoryError):
            return f"{name}: missing"
        return None

    with reading(folder), ThreadPoolExecutor(HASHING_THREADS) as pool:
        return [problem for problem in pool.map(find_problem, files) if problem is not None]


def find_newest_whole(
    checkpoints: Path, *, hashed: Sequence[str] = ALL_FILES
) -> tuple[Path | None, dict[Path, list[str]]]:
    """Returns the newest whole checkpoint, if any, and the problems of every newer one; changes nothing.

    Raises:
        TemporaryFailure: a file of these checkpoints cannot be read now.
        UserError: a newer version of terakoya wrote one of them.
    """
    damaged: dict[Path, list[str]] = {}
    for _, folder in reversed(list_checkpoints(checkpoints)):
        problems = find_problems(folder, hashed=hashed)
        if not problems:
            return folder, damaged
        damaged[folder] = problems
    return None, damaged

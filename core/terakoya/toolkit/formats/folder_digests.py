"""The sizes and SHA-256 hashes of an exported folder's files, in a file next to them that Transformers does not read.

They are written when the folder is complete. Whatever reads the folder compares what it reads. The same file says which
checkpoint the model is from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from terakoya.atomic_files import FileFacts, dump_hashed_json, load_hashed_json
from terakoya.errors import UserError
from terakoya.folder_kinds import IS_POINTER, is_pointer
from terakoya.toolkit.formats._partial_files import find_partial_files as find_partial_files
from terakoya.toolkit.formats._partial_files import refuse_partial_files

NAME = "terakoya_files.json"
MANIFEST = "manifest.json"
"""The file of a checkpoint that has the digests of its other files."""
WEIGHTS = (".safetensors", ".bin")
"""The endings of large files. All others are read at once, these while Transformers loads them."""
_REMEDY = f"export or download it again; or, if you have changed it on purpose, remove {NAME}"


def write(folder: Path, *, checkpoint: Path | None = None) -> None:
    """Writes the digests of all files of `folder` and of the folders in it; and which `checkpoint` of a run the model
    is from: its path from the run's folder on, and a digest of its weights."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): FileFacts.of(path).model_dump() for path in paths}
    files.pop(NAME, None)
    origin = _describe_origin(checkpoint) if checkpoint is not None else {}
    (folder / NAME).write_bytes(dump_hashed_json({"files": files, **origin}))


def _describe_origin(checkpoint: Path) -> dict[str, Any]:
    """Returns what is written about `checkpoint`; nothing if it is in no run. No folder above the run is named."""
    for run in checkpoint.parents[:2]:
        if (run / "checkpoints").is_dir():
            place = checkpoint.resolve().relative_to(run.resolve().parent).as_posix()
            return {"checkpoint": {"place": place, "weights": _digest_weights(checkpoint)}}
    return {}


def _digest_weights(checkpoint: Path) -> str:
    """Returns a digest of the hashes that the manifest of `checkpoint` has of the model or, where none is saved, of all
    files: the same for every run that ends with the same weights. The manifest itself also holds times."""
    recorded: Mapping[str, Mapping[str, Any]] = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    hashes = {name: facts["sha256"] for name, facts in recorded.items()}
    chosen = {name: digest for name, digest in hashes.items() if name.startswith("model/")} or hashes
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> Mapping[str, FileFacts] | None:
    """Returns file name -> digest; None if `folder` has no digests. Raises UserError if they are damaged."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        return {
            name: FileFacts.model_validate(facts)
            for name, facts in load_hashed_json(file.read_bytes())["files"].items()
        }
    except (ValueError, KeyError, AttributeError, ValidationError) as error:
        raise UserError(f"{file}: damaged: {error}; {_REMEDY}") from None


def find_checkpoint(folder: Path, near: Path) -> Path | None:
    """Returns the checkpoint that the model in `folder` is from, if its run is in the folder `near`; None if it is not,
    or if nothing is recorded."""
    place = read_place(folder)
    return near / place if place is not None and is_from(folder, near / place) else None


def read_place(folder: Path) -> str | None:
    """Returns where the checkpoint was that the model in `folder` is from, such as "run/checkpoints/step-00001000"; or
    None if nothing is recorded."""
    try:
        return str(load_hashed_json((folder / NAME).read_bytes())["checkpoint"]["place"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def is_from(folder: Path, checkpoint: Path) -> bool:
    """Returns whether the model in `folder` is recorded to be from `checkpoint`, wherever that is now."""
    try:
        origin = load_hashed_json((folder / NAME).read_bytes())["checkpoint"]
        return bool(_digest_weights(checkpoint) == origin["weights"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def find_changes(folder: Path) -> list[str]:
    """Reads all files of `folder` that have a digest. Returns what is wrong with each that is missing or changed.
    Raises UserError if the digests themselves are damaged."""
    recorded = read(folder) or {}
    return [*_size_changes(folder, recorded), *_changes(folder, recorded, recorded)]


def check(folder: Path) -> None:
    """Raises UserError for files of `folder` that are missing, changed, or not there as a whole."""
    if read(folder) is None:
        refuse_partial_files(folder)
    _refuse(folder, find_changes(folder))


@contextmanager
def check_while_loading(folder: Path) -> Iterator[None]:
    """Compares the small files of `folder`, and the sizes of all, before the block, which loads the model; compares the
    weights in a thread meanwhile, so that loading takes hardly longer. Without digests it looks whether files are there
    as a whole. Raises UserError if a file is missing, changed or not whole, also if the block fails for this reason."""
    recorded = read(folder)
    if recorded is None:
        refuse_partial_files(folder)
        yield
        return
    weights = [name for name in recorded if name.endswith(WEIGHTS)]
    _refuse(folder, _size_changes(folder, recorded) or _changes(folder, recorded, recorded.keys() - set(weights)))
    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(_changes, folder, recorded, weights)
        try:
            yield
        except Exception as error:
            if found := changes.result():
                raise UserError(_describe(folder, found)) from error
            raise
        _refuse(folder, changes.result())


def _size_changes(folder: Path, recorded: Mapping[str, FileFacts]) -> list[str]:
    """Returns the files that are missing or have another size."""
    changes = []
    for name, facts in recorded.items():
        file = folder / name
        if not file.is_file():
            changes.append(f"{name}: no such file")
        elif (size := file.stat().st_size) != facts.size:
            changes.append(
                f"{name}: {IS_POINTER}" if is_pointer(file) else f"{name}: expected {facts.size:,} bytes, got {size:,}"
            )
    return changes


def _changes(folder: Path, recorded: Mapping[str, FileFacts], names: Iterable[str]) -> list[str]:
    """Returns those of `names` that have the recorded size and another content."""
    changes = []
    for name in sorted(names):
        file, expected = folder / name, recorded[name]
        if file.is_file() and file.stat().st_size == expected.size:
            found = FileFacts.of(file)
            if found != expected:
                changes.append(f"{name}: expected SHA-256 {expected.sha256}, got {found.sha256}")
    return changes


def _refuse(folder: Path, changes: list[str]) -> None:
    if changes:
        raise UserError(_describe(folder, changes))


def _describe(folder: Path, changes: list[str]) -> str:
    return f"{folder}: changed since it was exported: {'; '.join(changes[:5])}; {_REMEDY}"

"""Files of a model's folder that are not there as a whole: pointers of Git LFS, and downloads that were cut."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import IS_POINTER, is_pointer

INDEX = "model.safetensors.index.json"


def find_partial_files(folder: Path) -> Iterator[str]:
    """Yields a file of `folder`, what is wrong with it, and what to do, for each that is not there as a whole. Of
    safetensors only headers are read."""
    weights = {"model.safetensors", "adapter_model.safetensors", *_shards(folder / INDEX)}
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        if is_pointer(file):
            yield f"{file.name}: {IS_POINTER}"
        elif file.name in weights:
            expected, got = _whole_size(file), file.stat().st_size
            if expected is None:
                yield f"{file.name}: ends within its header, or is no file of safetensors; download it again"
            elif expected != got:
                yield f"{file.name}: expected {expected:,} bytes by its header, got {got:,}; download it again"


def refuse_partial_files(folder: Path) -> None:
    """Raises UserError for the first of `find_partial_files`."""
    for problem in find_partial_files(folder):
        raise UserError(f"{folder}/{problem}")


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _whole_size(file: Path) -> int | None:
    """Returns how many bytes the file of safetensors has by its header; None without a whole header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size - 8:
            return None
        try:
            header: Mapping[str, Any] = json.loads(stream.read(length))
            ends = [facts["data_offsets"][1] for name, facts in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    return 8 + length + max(ends, default=0)

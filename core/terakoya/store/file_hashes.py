"""Checks that the files of a store still have the hashes that `store.json` records. Everything that makes a store or a
file from a store does so: a damaged store must not become a new one that looks valid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from terakoya.atomic_files import FileFacts
from terakoya.errors import UserError

TOKENIZER = "tokenizer"
"""The sub-folder of a store that holds a copy of its tokenizer."""
_CHUNK = 1 << 20
_REMEDY = "`terakoya store verify` lists all damage; put an intact copy in its place or prepare the store again"


def find_changes(folder: Path, files: Mapping[str, FileFacts]) -> Iterator[str]:
    """Reads `files`, by their paths in `folder`. Yields a description of each that is missing or was changed."""
    for name, recorded in files.items():
        file = folder / name
        try:
            facts = FileFacts.of(file)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            yield f"{file}: no such file"
            continue
        if facts.size != recorded.size:
            yield f"{file}: expected {recorded.size:,} bytes, got {facts.size:,}"
        elif facts != recorded:
            yield _describe(file, recorded.sha256, facts.sha256)


def find_tokenizer_changes(folder: Path, files: Mapping[str, FileFacts]) -> Iterator[str]:
    """Yields a description of each file of the tokenizer in the store `folder` that was changed, removed or added since
    the store was made; `files` are all files that store.json lists."""
    recorded = {name: facts for name, facts in files.items() if name.startswith(f"{TOKENIZER}/")}
    yield from find_changes(folder, recorded)
    for file in sorted((folder / TOKENIZER).rglob("*")):
        path = file.relative_to(folder)
        if file.is_file() and path.as_posix() not in recorded and not any(part[0] == "." for part in path.parts):
            yield f"{file}: was not there when the store was made; remove it"


def check_tokenizer(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Raises UserError for the first of `find_tokenizer_changes`."""
    for change in find_tokenizer_changes(folder, files):
        raise UserError(f"{change}; {_REMEDY}")


def check_hashes(folder: Path, files: Mapping[str, FileFacts], *names: str) -> None:
    """Reads those of `files` in `folder` that are `names`. Raises UserError for the first that was changed."""
    for change in find_changes(folder, {name: files[name] for name in names}):
        raise UserError(f"{change}; {_REMEDY}")


def read_and_check(
    folder: Path, files: Mapping[str, FileFacts], name: str, *, chunk_bytes: int = _CHUNK
) -> Iterator[bytes]:
    """Yields the bytes of that of `files` in `folder` that is `name`. Raises UserError if it is missing, and after the
    last chunk if their hash is not the recorded one."""
    digest = hashlib.sha256()
    if not (folder / name).is_file():
        raise UserError(f"{folder / name}: no such file; {_REMEDY}")
    with (folder / name).open("rb") as stream:
        while chunk := stream.read(chunk_bytes):
            digest.update(chunk)
            yield chunk
    check_hash(folder / name, files[name], digest)


def check_hash(file: Path, recorded: FileFacts, digest: hashlib._Hash) -> None:
    """Raises UserError unless `digest` is the SHA-256 that store.json records for `file`."""
    if digest.hexdigest() != recorded.sha256:
        raise UserError(f"{_describe(file, recorded.sha256, digest.hexdigest())}; {_REMEDY}")


def _describe(file: Path, expected: str, digest: str) -> str:
    return f"{file}: content changed since the store was made: expected SHA-256 {expected}, got {digest}"

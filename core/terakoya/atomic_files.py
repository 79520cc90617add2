"""Atomic writes of files, and locks on folders."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict

from terakoya.errors import UserError


class FileFacts(BaseModel):
    """The size in bytes and the SHA-256 of a file of the token store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    sha256: str


class HashedFile:
    """A file that is being written, with its size and hash so far."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | np.ndarray) -> None:
        """Appends `data`."""
        view = _bytes(data)
        self._stream.write(view)
        self._hash.update(view)
        self._size += view.nbytes

    def facts(self) -> FileFacts:
        """Returns the size and hash of the written data."""
        return FileFacts(size=self._size, sha256=self._hash.hexdigest())


@contextmanager
def write_atomically(file: Path, *, draft_folder: Path | None = None) -> Iterator[HashedFile]:
    """Writes `file` completely or not at all. The data is written under another name, which contains host and process,
    in `draft_folder` (by default the folder of `file`), flushed to disk, then renamed."""
    draft = (draft_folder or file.parent) / f"{file.name}.{socket.gethostname()}.{os.getpid()}.tmp"
    with draft.open("wb") as stream:
        yield HashedFile(stream)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Flushes renames in `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(data: bytes | np.ndarray) -> memoryview:
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


LOCK = ".lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks `folder` for this process. Raises UserError with the host and process that hold the lock already."""
    file = folder / LOCK
    while True:
        stream = file.open("a+")
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            stream.close()
            raise UserError(
                f"{folder}: expected a folder that no other process writes to, but {holder} is preparing it; "
                "wait for it, or choose another --out"
            ) from None
        # The previous holder may have removed the file after we opened it and before we locked it.
        if file.exists() and os.fstat(stream.fileno()).st_ino == file.stat().st_ino:
            break
        stream.close()
    try:
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on host {socket.gethostname()}")
        stream.flush()
        yield
    finally:
        file.unlink(missing_ok=True)
        stream.close()

"""The blocks of a store's data files that are fetched from an object store where they are first read.

A file here is as long as the one there, with holes for what was not fetched. Whether a block is here its checksum
says: a hole, or a block that was written in part, has another one and is fetched. So nothing is recorded, and
several processes may fill one file.
"""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from terakoya.errors import FileError, TemporaryFailure, UserError
from terakoya.store.block_checksums import BLOCK_BITS, BLOCK_BYTES, CHECKSUMS, CheckedFile
from terakoya_places.object_folder import ObjectFolder

THREADS = 32
"""How many requests of a process are under way at the same time."""
FILL_THREADS = 2
"""How many of them fetch what no row has asked for yet."""
REQUEST_BLOCKS = 32
"""Largest number of neighbouring blocks of one request: 4 MiB."""
ATTEMPTS = 5
PAUSES = (0.2, 1.0, 5.0, 20.0)
"""Seconds before each further attempt."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class FetchedFile(CheckedFile):
    """A file of which each block is fetched when it is first touched, where it is not here."""

    def __init__(self, remote: ObjectFolder, folder: Path, name: str, size: int, checksums: np.ndarray) -> None:
        """`folder`/`name` has `size` bytes, holes included; `checksums` (blocks,) uint32 are those of all blocks."""
        super().__init__(folder / name, checksums)
        self.remote, self.name, self.size = remote, name, size

    @property
    def absent(self) -> np.ndarray:
        """Whether each block is not here, or was not compared yet, (blocks,) bool."""
        return self._unchecked

    def forget(self, blocks: np.ndarray) -> None:
        """Removes `blocks` (n,) from the disk; they are fetched when they are touched again."""
        with self._lock:
            self._unchecked[blocks] = True
            self.remaining += len(blocks)
        with self._file.open("r+b") as file:
            punch_holes(file.fileno(), blocks)

    def missing(self, blocks: Iterable[int]) -> list[int]:
        """Returns those of `blocks` that are not here; the others count as compared."""
        absent = []
        for block in blocks:
            if self._is_whole(block):
                self._mark(block)
            else:
                absent.append(block)
        return absent

    def fetch(self, first: int, stop: int) -> None:
        """Fetches the blocks [first, stop). Raises UserError where they are damaged there, TemporaryFailure where the
        store does not answer after several attempts."""
        begin, end = first << BLOCK_BITS, min(stop << BLOCK_BITS, self.size)
        content = self._read(begin, end)
        for block in range(first, stop):
            at = (block - first) << BLOCK_BITS
            if zlib.crc32(content[at : at + BLOCK_BYTES]) != int(self._checksums[block]):
                raise UserError(
                    f"{self.remote}/{self.name}: block {block:,} (bytes {begin + at:,} to "
                    f"{min(begin + at + BLOCK_BYTES, end):,}): damaged since the store was made: its checksum is "
                    f"another one than in {CHECKSUMS}; put an intact copy in its place, and run the same command again"
                )
        try:
            with self._file.open("r+b") as file:
                position = begin
                while content:
                    written = os.pwrite(file.fileno(), content, position)
                    content, position = content[written:], position + written
        except OSError as error:
            raise FileError(f"{self._file}: {error.strerror}", error.errno) from error
        for block in range(first, stop):
            assert self._is_whole(block), f"{self._file}: block {block} is not what was written"
            self._mark(block)

    def _read(self, begin: int, end: int) -> memoryview:
        for attempt in range(ATTEMPTS):
            try:
                content = self.remote.read_range(self.name, begin, end)
                if len(content) == end - begin:
                    return memoryview(content)
                raise TemporaryFailure(
                    f"{self.remote}/{self.name}: expected {end - begin:,} bytes from {begin:,} on, got {len(content):,}"
                )
            except FileNotFoundError as error:
                raise UserError(f"{error}; the store is incomplete: copy it there again") from None
            except TemporaryFailure:
                if attempt + 1 == ATTEMPTS:
                    raise
                threading.Event().wait(PAUSES[attempt])
        raise AssertionError


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the ranges [first, stop) of neighbours in the rising `blocks`, each of `REQUEST_BLOCKS` at most."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block and block - found[-1][0] < REQUEST_BLOCKS:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


def fetch(pool: ThreadPoolExecutor, wanted: Sequence[tuple[FetchedFile, Sequence[int]]]) -> None:
    """Returns when the blocks that each file wants are here, those of several files at the same time. Raises as
    `FetchedFile.fetch` does."""
    requests = [(file, *run) for file, blocks in wanted for run in runs(file.missing(blocks))]
    if len(requests) == 1:
        file, first, stop = requests[0]
        file.fetch(first, stop)
    elif requests:
        list(pool.map(lambda each: each[0].fetch(each[1], each[2]), requests))


def fill(files: Sequence[FetchedFile], stop: threading.Event, *, ended: Callable[[], None]) -> None:
    """Begins to fetch all blocks of `files` that are not here, from the first on, and calls `ended` after the last one.
    It also ends when `stop` is set, or a request fails: the rows that need its blocks meet the error again."""

    def fill_all() -> None:
        try:
            with ThreadPoolExecutor(FILL_THREADS, "terakoya-fill") as pool:
                list(pool.map(part, range(FILL_THREADS)))
        finally:
            ended()

    def part(number: int) -> None:
        for file in files:
            for first in range(number * REQUEST_BLOCKS, len(file.absent), FILL_THREADS * REQUEST_BLOCKS):
                waiting = first + np.flatnonzero(file.absent[first : first + REQUEST_BLOCKS])
                for run in runs(file.missing(waiting.tolist())):
                    if stop.is_set():
                        return
                    try:
                        file.fetch(*run)
                    except (UserError, OSError):
                        return

    threading.Thread(target=fill_all, name="terakoya-fill", daemon=True).start()


def punch_holes(descriptor: int, blocks: np.ndarray) -> None:
    """Gives the space of `blocks` (n,) of the file back to the disk; its length stays. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for block in blocks.tolist():
        offset, length = ctypes.c_int64(block << BLOCK_BITS), ctypes.c_int64(BLOCK_BYTES)
        if libc.fallocate64(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

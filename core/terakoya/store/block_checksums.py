"""Checksums of the blocks of a store's data files. A process compares a block when it first reads it, so damage ends a
run before a wrong token is trained on, and no start waits for a whole file to be read.

A block has 128 KiB, as much as Linux reads ahead by itself; its checksum is CRC-32, which takes a few hundredths of a
millisecond. `tokens.checksums` holds those of the data files, one file after the other; its SHA-256 is in store.json.

See docs/design/store-integrity.md.

Letters: n ranges of bytes.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from terakoya.atomic_files import FileFacts, as_bytes
from terakoya.errors import UserError

CHECKSUMS = "tokens.checksums"
BLOCK_BITS = 17
BLOCK_BYTES = 1 << BLOCK_BITS


class BlockChecksums:
    """Computes the checksums of a file while it is written."""

    def __init__(self) -> None:
        self._values = array("I")
        self._size = 0

    def add(self, data: bytes | np.ndarray) -> None:
        """Continues with `data`."""
        view = as_bytes(data)
        while view:
            position = self._size % BLOCK_BYTES
            if not position:
                self._values.append(0)
            part = view[: BLOCK_BYTES - position]
            self._values[-1] = zlib.crc32(part, self._values[-1])
            self._size += len(part)
            view = view[len(part) :]

    def values(self) -> np.ndarray:
        """Returns the checksums, (blocks,) uint32."""
        return np.array(self._values, "<u4")


class CheckedFile:
    """A file of which each block is compared with its checksum when it is first touched; `remaining` blocks are not
    compared yet."""

    def __init__(self, file: Path, checksums: np.ndarray) -> None:
        """`checksums` (blocks,) uint32 are those of all blocks of `file`."""
        self._file, self._checksums = file, checksums
        self._unchecked = np.ones(len(checksums), bool)
        self.remaining = len(checksums)
        self._lock = threading.Lock()  # rows are read ahead in a thread

    @cached_property
    def _content(self) -> np.ndarray:
        return np.asarray(np.memmap(self._file, np.uint8, "r"))

    def skip(self, stop: int) -> None:
        """Leaves out the whole blocks of the bytes before `stop`, which are never touched."""
        self._unchecked[: stop >> BLOCK_BITS] = False
        self.remaining = int(np.count_nonzero(self._unchecked))

    def touch(self, start: np.ndarray, stop: np.ndarray) -> None:
        """Compares the blocks of the bytes [start, stop), (n,) each and none empty, that are not compared yet. Raises
        UserError for a block that is damaged."""
        for block in self.find_unchecked(start, stop):
            self._compare(block)

    def find_unchecked(self, start: np.ndarray, stop: np.ndarray) -> list[int]:
        """Returns the blocks of the bytes [start, stop), (n,) each and none empty, that are not compared yet."""
        first, last = start >> BLOCK_BITS, (stop - 1) >> BLOCK_BITS
        new = self._unchecked
        if not (new[first].any() or new[last].any() or (last - first > 1).any()):
            return []
        blocks: set[int] = set()
        for low, high in np.unique(np.stack([first, last], 1), axis=0).tolist():
            blocks.update((low + np.flatnonzero(new[low : high + 1])).tolist())
        return sorted(blocks)

    def damaged_blocks(self) -> list[int]:
        """Compares all blocks. Returns the numbers of those that are damaged."""
        return [block for block in range(len(self._checksums)) if not self._is_whole(block)]

    def _compare(self, block: int) -> None:
        if not self._is_whole(block):
            start = block << BLOCK_BITS
            stop = min(start + BLOCK_BYTES, len(self._content))
            raise UserError(
                f"{self._file}: block {block:,} (bytes {start:,} to {stop:,}): damaged since the store was made: its "
                f"checksum is another one than in {CHECKSUMS}; `terakoya store verify` lists all damage; put an intact "
                "copy in its place, or prepare the store again, and run the same command again"
            )
        self._mark(block)

    def _mark(self, block: int) -> None:
        """Counts `block` as compared."""
        with self._lock:
            self.remaining -= int(self._unchecked[block])
            self._unchecked[block] = False

    def _is_whole(self, block: int) -> bool:
        content = self._content[block << BLOCK_BITS : (block + 1) << BLOCK_BITS]
        return zlib.crc32(content.data) == int(self._checksums[block])


def open_checked_files(
    folder: Path,
    checksums: np.ndarray,
    files: Mapping[str, FileFacts],
    *,
    open_file: Callable[[Path, np.ndarray], CheckedFile] = CheckedFile,
) -> dict[str, CheckedFile]:
    """Returns the data `files` of the store `folder`, in the order of `checksums` (blocks of all files,)."""
    opened, first = {}, 0
    for name, facts in files.items():
        count = -(-facts.size // BLOCK_BYTES)
        opened[name] = open_file(folder / name, checksums[first : first + count])
        first += count
    return opened

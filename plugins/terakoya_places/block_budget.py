"""Keeps what is fetched of a store within a number of bytes: the blocks that were read longest ago make room.

A block is read through mapped memory, so it must stay while anybody reads it: whoever reads says so (`reading`), and no
block that was touched since the oldest of those began is removed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from terakoya.store.block_checksums import BLOCK_BITS, BLOCK_BYTES
from terakoya_places.fetched_blocks import FetchedFile

SHARE_REMOVED = 8
"""Room is made for this part of the budget at a time: 1/8."""


def can_remove_blocks() -> bool:
    """Whether this system removes parts of a file."""
    return sys.platform.startswith("linux")


class BlockBudget:
    """The blocks of `files` that are here, at most `limit` bytes of them but for what is being read."""

    def __init__(self, files: Mapping[str, FetchedFile], limit: int) -> None:
        self._files = tuple(files.values())
        self._last_use = {file.name: np.zeros(-(-file.size // BLOCK_BYTES), np.int64) for file in self._files}
        self._limit_blocks = max(1, limit >> BLOCK_BITS)
        self._clock = 1
        self._readers: dict[int, int] = {}  # thread -> when it began
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What this thread touches while the block runs stays for so long."""
        thread = threading.get_ident()
        if thread in self._readers:
            yield
            return
        with self._lock:
            self._clock += 1
            self._readers[thread] = self._clock
        try:
            yield
        finally:
            with self._lock:
                del self._readers[thread]

    def touch(self, file: FetchedFile, start: np.ndarray, stop: np.ndarray) -> list[int]:
        """Returns the blocks of the bytes [start, stop) of `file`, (n,) each and none empty, that are not here."""
        assert threading.get_ident() in self._readers, f"{file.name}: read without saying so"
        with self._lock:
            uses = self._last_use[file.name]
            for first, last in np.unique(np.stack([start >> BLOCK_BITS, (stop - 1) >> BLOCK_BITS], 1), axis=0).tolist():
                uses[first : last + 1] = self._clock
            return file.find_unchecked(start, stop)

    def make_room(self) -> None:
        """Removes the blocks that were used longest ago where there are more than the limit."""
        excess = sum(len(file.absent) - file.remaining for file in self._files) - self._limit_blocks
        if excess <= 0:
            return
        with self._lock:
            here = [np.flatnonzero(~file.absent) for file in self._files]
            oldest_reader = min(self._readers.values(), default=self._clock + 1)
            uses = np.concatenate(
                [self._last_use[file.name][blocks] for file, blocks in zip(self._files, here, strict=True)]
            )
            numbers = np.repeat(np.arange(len(here)), [len(blocks) for blocks in here])
            blocks = np.concatenate(here)
            order = np.argsort(uses, kind="stable")[: excess + self._limit_blocks // SHARE_REMOVED]
            order = order[uses[order] < oldest_reader]
            for number, file in enumerate(self._files):
                file.forget(np.sort(blocks[order[numbers[order] == number]]))

"""Keeps memory that a CPU step frees, for the next step."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Options of glibc's mallopt(3), by their names and numbers there."""
KEEPING: Mapping[int, int] = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
RETURNING: Mapping[int, int] = {M_MMAP_MAX: 65_536, M_TRIM_THRESHOLD: 128 << 10, M_TOP_PAD: 128 << 10}
"""glibc's defaults."""
_keeps = False


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in the process; returns whether it accepted.

    By default glibc maps each large tensor anew from the kernel and returns it when it is freed, so that every step
    pays for millions of page faults: a seventh of the time of a small BERT's step. A training process uses as much
    memory in the next step as in this one. Does nothing on systems without glibc.
    """
    global _keeps
    _keeps = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc" and _set(KEEPING)
    return _keeps


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """While open, a large tensor that is freed leaves the process, as by default.

    Weights that are computed one at a time have different sizes, and what is allocated meanwhile lies between them:
    memory that is kept would not fit the next one, and the process would come to hold as much as all of them.
    """
    if not _keeps:
        yield
        return
    _set(RETURNING)
    try:
        yield
    finally:
        _set(KEEPING)


def _set(options: Mapping[int, int]) -> bool:
    """Sets options of glibc; returns whether it accepted all."""
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in options.items())

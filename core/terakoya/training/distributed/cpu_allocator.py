"""Keeps memory that a CPU step frees, for the next step."""

from __future__ import annotations

import ctypes
import platform
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Options of glibc's mallopt(3), by their names and numbers there."""


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in the process; returns whether it accepted.

    By default glibc maps each large tensor anew from the kernel and returns it when it is freed, so that every step
    pays for millions of page faults: a seventh of the time of a small BERT's step. A training process uses as much
    memory in the next step as in this one. Does nothing on systems without glibc.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(
        mallopt(option, value) == 1
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    )

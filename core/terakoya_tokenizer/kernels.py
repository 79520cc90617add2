"""Functions in C: compiled with the machine's C compiler, once for each user, and loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("kernels.c")

logger = logging.getLogger("terakoya")


def load_library(source: Path) -> ctypes.CDLL | None:
    """Returns the functions of the C file `source`; None where they cannot be compiled: without a C compiler (`cc`, or
    what the environment variable CC names) or a cache folder that can be written."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), "-O3", "-shared", "-fPIC"]
    version = hashlib.sha256(
        repr((source.read_bytes(), command, sys.platform, platform.machine())).encode()
    ).hexdigest()[:16]
    try:
        if sys.byteorder != "little":
            raise OSError("the dictionaries' files are little-endian")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "terakoya" / "kernels"
        file = cache / f"{version}.so"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and (cache.stat().st_uid != os.getuid() or cache.stat().st_mode & 0o022):
            raise OSError(f"others can write into {cache}")  # what is loaded from there runs as this user
        if not file.is_file():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                compiled = Path(work) / file.name
                subprocess.run([*command, "-o", compiled, source], check=True, capture_output=True)
                compiled.replace(file)
        return ctypes.CDLL(str(file))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        logger.debug("%s is not compiled, slower libraries do its work: %s", source.name, error)
        return None


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """Returns the functions of `kernels.c`; None where they cannot be compiled."""
    if (kernels := load_library(_SOURCE)) is None:
        return None
    number, array = ctypes.c_int64, ctypes.c_void_p
    kernels.count_words.argtypes = (array, array, number, array)
    kernels.split_lines.argtypes = (array, array, array, array, number, array, array)
    kernels.find_words.argtypes = (array, number, array, number, array, number, *[array] * 5)
    kernels.find_words.restype = kernels.work_size.restype = number
    return kernels


def address(array: np.ndarray) -> int:
    """Returns where the numbers of an array lie, without gaps between them."""
    assert array.flags.c_contiguous
    place: int = array.ctypes.data
    return place

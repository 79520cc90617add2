"""The folder of a run: what it may be, and who uses it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from pathlib import Path

from terakoya.atomic_files import take_lock
from terakoya.errors import UserError
from terakoya.folder_kinds import kind_of
from terakoya.places import check_local
from terakoya.process_pool import LAUNCHER_VARIABLE, is_alive

HOLDER = re.compile(r"pid (\d+) on (\S+?)(?:, started by pid (\d+))?")
"""What a process writes into the lock that it holds."""
ATTEMPTS = 3
"""How often a process tries to take the lock before it reports that the run is in use."""


def check_place(out: Path) -> None:
    """Raises UserError if `out` cannot be a run's folder: it is elsewhere, a file, or a folder of something else."""
    check_local(out, "the run's folder")
    kind = kind_of(out)
    if (out.exists() and not out.is_dir()) or kind in ("token store", "Transformers model", "tokenizer", "checkpoint"):
        there = f"a {kind}" if out.is_dir() else "a file"
        raise UserError(f"{out}: expected a new folder or a run's, got {there}; choose another --out")


def lock_run(path: Path) -> int:
    """Takes the run's lock and returns its handle. The lock ends when the handle is closed or the process dies.

    The file names the process that holds the lock.

    Raises:
        UserError: another process holds it.
        OSError: as `take_lock` raises it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for attempt in reversed(range(ATTEMPTS)):
            try:
                take_lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
                break
            except BlockingIOError:
                if not attempt:
                    raise
                time.sleep(0.05)  # `terakoya status` takes the lock for an instant
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise UserError(f"{path.parent}: is in use by {describe_holder(path.read_text().strip())}") from None
        raise
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    started_by = f", started by pid {launcher}" if launcher else ""
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}{started_by}".encode())
    return handle


def describe_holder(holder: str) -> str:
    """Returns a sentence about the process that holds a run's lock and wrote `holder` into it: who it is, and how to
    end it."""
    match = HOLDER.fullmatch(holder)
    if match is None:
        return f"{holder or 'another process'}; wait for it or choose another --out"
    process, host, launcher = match.groups()
    here = host == socket.gethostname()
    command = f"kill {process}" if here else f"ssh {host} kill {process}"
    if here and launcher and not is_alive(int(launcher)):
        return (
            f"pid {process} on {host}, whose launcher (pid {launcher}) is gone; `{command}` makes it save and end, "
            f"`kill -9 {process}` ends it at once"
        )
    return f"pid {process} on {host}; wait for it, make it save and end with `{command}`, or choose another --out"

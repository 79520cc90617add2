"""The run's folder: shared by all nodes, used by one run at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from terakoya.errors import UserError
from terakoya.training.distributed.context import DistributedContext

ATTEMPTS = 3
"""How often a process tries to take the lock before it reports that the run is in use."""


@contextlib.contextmanager
def hold(out: Path, context: DistributedContext) -> Iterator[None]:
    """Creates the run's folder and holds its lock while the context is open; collective.

    A file with a nonce proves that all nodes see the same file system; the lock, that only one run uses the folder.

    Raises:
        UserError: on every rank, if either does not hold.
    """
    error: Exception | None = None
    handle = None
    nonce = context.broadcast(os.urandom(8).hex())
    nonce_file = out / f".nonce-{nonce}"
    if context.is_main:
        try:
            out.mkdir(parents=True, exist_ok=True)
            handle = lock_run(out / "run.lock")
            (out / "checkpoints").mkdir(exist_ok=True)
            nonce_file.write_text(nonce)
        except (OSError, UserError) as raised:
            error = raised
    try:
        if context.world_size == 1 and error:
            raise error if isinstance(error, UserError) else UserError(f"{out}: {error}")
        context.raise_on_all_ranks(f"opening {out}", error)
        if not nonce_file.exists():
            error = UserError(f"{out} is not the folder that rank 0 sees; all nodes need one shared file system")
        context.raise_on_all_ranks("sharing the run's folder", error)
        if context.is_main:
            nonce_file.unlink()
        yield
    finally:
        if handle is not None:
            os.close(handle)


def lock_run(path: Path) -> int:
    """Takes the run's lock and returns its handle. The lock ends when the handle is closed or the process dies.

    The file names the process that holds the lock.

    Raises:
        UserError: another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for attempt in reversed(range(ATTEMPTS)):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not attempt:
                    raise
                time.sleep(0.05)  # `terakoya status` takes the lock for an instant
    except BlockingIOError:
        holder = path.read_text().strip() or "another process"
        os.close(handle)
        raise UserError(f"{path.parent}: is in use by {holder}; wait for it or choose another --out") from None
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def free_bytes(folder: Path) -> int:
    """Returns the free disk space in bytes where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free

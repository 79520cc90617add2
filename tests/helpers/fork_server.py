"""The server from which tests fork processes: one for all workers of pytest-xdist.

Multiprocessing starts a fork server for each process that uses one, and `warm` takes seconds of CPU time to import.
Here pytest's own process starts it, its workers use it in place of their own, and it imports `warm` when the first of
them needs it. It ends with pytest's own process, however that ends. Without xdist that process is its only worker.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

WANTED = "FORK_SERVER_WANTED"
"""The variable that tells `wait_for_use` the id of the server's parent and the file for which it waits."""
_STARTING = threading.Lock()


def start(**variables: str) -> None:
    """Starts the server of this process, if it does not run yet, with `variables` in its environment."""
    with _STARTING:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # it finds helpers by it alone
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


@functools.cache
def share(modules: Sequence[str] = ("warm",)) -> tuple[str, str]:
    """Starts the server of this process for other processes; it imports `modules` as soon as one of them needs it.
    Returns what they give to `use`."""
    wanted = Path(util.get_temp_dir(), "wanted")
    forkserver.set_forkserver_preload(["wait_for_use", *modules])
    start(**{WANTED: f"{os.getpid()} {wanted}"})
    return str(forkserver._forkserver._forkserver_address), str(wanted)  # type: ignore[attr-defined]


def address() -> str:
    """Where the server listens that this process uses; it runs."""
    start()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def use(address: str, wanted: str = os.devnull) -> None:
    """Lets this process use the server that listens at `address`, which another process has started with `share`; until
    its first use it waits for the file `wanted`."""

    def ensure_running() -> None:
        resource_tracker.ensure_running()
        Path(wanted).touch()

    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    # the other end of a real one would tell the server that this process has ended; it lives with its own parent only
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = forkserver.ensure_running = ensure_running  # type: ignore[method-assign]

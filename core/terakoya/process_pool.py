"""A pool of worker processes, which end when this process ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from terakoya.errors import UserError

Result = TypeVar("Result")
Submit = Callable[..., "Future[Any]"]


def warm_up(modules: Sequence[str] = ()) -> None:
    """Starts the server process from which workers are forked. It imports `modules` and the modules of terakoya that
    this process has loaded, while this process continues with its own start. Without this call `workers` does the same,
    but later."""
    context = _context()
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    loaded = [name for name in sys.modules if name.partition(".")[0] == "terakoya"]
    context.set_forkserver_preload([*loaded, *modules])
    forkserver.ensure_running()


@contextmanager
def workers(
    processes: int, start: Callable[..., None], arguments: Sequence[Any], *, task: str, remedy: str = ""
) -> Iterator[Submit]:
    """Starts `processes` worker processes, each of which first calls `start(*arguments)`. Yields a function that
    submits a call to one of them and returns its Future. The workers end when the block ends with an error, and when
    this process dies.

    Raises:
        UserError: a worker died. The message names the `task` and ends with the sentence `remedy`.
    """
    context = _context()
    warm_up([start.__module__])
    worker_end, parent_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _start, (worker_end, dict(os.environ), start, tuple(arguments)))
    try:
        yield pool.submit
    except BrokenProcessPool as error:
        raise UserError(
            f"{task}: a worker process died, most likely killed for want of memory; use fewer than "
            f"--processes {processes}. {remedy}".rstrip()
        ) from error
    except BaseException:
        parent_end.close()  # the workers exit at once
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        parent_end.close()
        worker_end.close()


def _context() -> Any:
    """Returns the multiprocessing context. Where the system supports it, workers are forked from a server process that
    has imported everything, which is fast. They are never forked from this process: its threads and locks would be
    copied in an arbitrary state."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def _start(
    parent: Connection, environment: dict[str, str], start: Callable[..., None], arguments: Sequence[Any]
) -> None:
    """Makes this process a worker, which exits at once when the other end of `parent` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    os.environ.clear()  # the server has the environment of its own start
    os.environ.update(environment)
    start(*arguments)


def _exit_with(parent: Connection) -> None:
    parent.poll(None)
    os._exit(1)


def available_cores() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

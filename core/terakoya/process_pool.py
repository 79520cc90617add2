"""Processes that share work: as many new ones as asked for, none of which outlives this one."""

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
    """Starts the process that workers are forked from, which imports `modules` and what terakoya has loaded here, while
    this process goes on with its own start. Without it `workers` does the same, only later."""
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
    """`processes` new processes, each of which calls `start(*arguments)` first. Yields what hands a call to one of them
    and returns its Future. They leave when the block is left by an error, and when this process dies.

    Raises UserError when one of them dies: `task` is what they were at, `remedy` a sentence on what to do next.
    """
    context = _context()
    warm_up([start.__module__])
    worker_end, our_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _start, (worker_end, dict(os.environ), start, tuple(arguments)))
    try:
        yield pool.submit
    except BrokenProcessPool as error:
        raise UserError(
            f"{task}: a worker process died, most likely killed for want of memory; use fewer than "
            f"--processes {processes}. {remedy}".rstrip()
        ) from error
    except BaseException:
        our_end.close()  # the workers leave at once
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        our_end.close()
        worker_end.close()


def _context() -> Any:
    """Forked from a server that has imported everything, where the system can: a worker then starts in no time. Never
    forked from this process, whose threads and locks would be copied in whatever state they are in."""
    methods = multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")


def _start(
    parent: Connection, environment: dict[str, str], start: Callable[..., None], arguments: Sequence[Any]
) -> None:
    """Makes this process a worker: it ends at once when the other end of `parent` is closed, by will or by death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    os.environ.clear()  # the server's is that of its own start
    os.environ.update(environment)
    start(*arguments)


def _leave_with(parent: Connection) -> None:
    parent.poll(None)
    os._exit(1)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Processes beside this one, which are watched, and ended with all that they have started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

START_METHOD = "spawn"
"""How processes start: CUDA does not survive a fork."""


class Beside:
    """A process in a session of its own, and a pipe to it.

    Attributes:
        pipe: this process's end of the pipe.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        """Starts a process that calls `serve` with the arguments and its end of the pipe."""
        context: Any = multiprocessing.get_context(START_METHOD)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_in_own_session, args=(serve, *arguments, theirs))
        self._process.start()
        theirs.close()

    def answer(self, seconds: float | None) -> Any:
        """Returns what the process sends next, within so many seconds; None is any time.

        Raises:
            TimeoutError: it sent nothing in that time.
            EOFError: it has ended.
        """
        try:
            if not self.pipe.poll(seconds):
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            return self.pipe.recv()
        except ConnectionError as lost:
            raise EOFError from lost

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the process and of all that run below it, so far."""
        seconds = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for each in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(each.cpu_times()[:4])  # with those of children that have ended
        return seconds

    def end(self) -> None:
        """Ends the process and all that run below it, and waits until they have ended."""
        if self.pipe.closed:
            return
        ended: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            ended = _end_family(psutil.Process(self._process.pid))
        self._process.join()
        end = time.monotonic() + 10
        while any(runs(each.pid) for each in ended) and time.monotonic() < end:
            time.sleep(0.01)
        self.pipe.close()


def runs(pid: int) -> bool:
    """Returns whether a process computes or may compute: it is there, and not only in the list of processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _end_family(process: psutil.Process) -> list[psutil.Process]:
    """Ends a process and those below it, and returns them. Each is stopped before its children are looked for, so that
    it starts no other one in the meantime."""
    process.suspend()
    ended = [process]
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            ended += _end_family(child)
    process.kill()
    return ended


def _in_own_session(serve: Callable[..., None], *arguments: Any) -> None:
    os.setsid()  # a signal to one group does not reach the other
    serve(*arguments)

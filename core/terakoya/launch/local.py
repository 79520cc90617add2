"""Starts several processes on this machine when no launcher did."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from terakoya.launch import oom_killer
from terakoya.log import error_console
from terakoya.process_pool import available_cores

GRACE_SECONDS = 15.0
"""How long the other processes may run after one has failed, before they are terminated."""


def run_processes(arguments: Sequence[str], processes: int) -> int:
    """Runs `python -m terakoya ARGUMENTS` in `processes` processes that form one process group, and waits for them.

    Forwards SIGINT and SIGTERM. Each process gets an equal share of the cores as threads, unless OMP_NUM_THREADS is
    set: more threads than cores are many times slower. Prints a message about a process that a signal ended, and
    whether the kernel was out of memory. Returns the first failure's exit code, else 0.
    """
    kills_before = oom_killer.count_oom_kills()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // processes))),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "terakoya", *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # each signal then arrives once, through `forward`
        )
        for rank in range(processes)
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(children, kills_before)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _wait(children: Sequence[subprocess.Popen[bytes]], kills_before: Mapping[str, int]) -> int:
    """Waits for all children; returns the first failure's exit code, else 0. After a failure the others have
    `GRACE_SECONDS` to notice it, as long again after a SIGTERM, and are then killed. `kills_before` holds the counts of
    `count_oom_kills` before the start."""
    first_failure = 0
    pending_signals = [(signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 2 * GRACE_SECONDS)]
    failed_at = 0.0
    while True:
        codes = [child.poll() for child in children]  # a list: a generator would stop at the first child that runs
        if not first_failure:
            rank, first_failure = next(((rank, code) for rank, code in enumerate(codes) if code), (0, 0))
            failed_at = time.monotonic()
            if first_failure and (
                message := oom_killer.explain_exit(rank, first_failure, kills_before, oom_killer.count_oom_kills())
            ):
                error_console().print(message, markup=False, soft_wrap=True)
        elif pending_signals and time.monotonic() - failed_at > pending_signals[0][1]:
            number, _ = pending_signals.pop(0)
            for child in children:
                if child.poll() is None:
                    child.send_signal(number)
        if None not in codes:
            return first_failure
        time.sleep(0.05)

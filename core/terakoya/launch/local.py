"""Several processes on this machine, for those who start without a launcher."""

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

from terakoya.launch import oom_killer as killed
from terakoya.log import error_console
from terakoya.process_pool import cores

GRACE_SECONDS = 15.0
"""How long the others may go on after one process has failed before they are ended."""


def run_processes(arguments: Sequence[str], processes: int) -> int:
    """Runs `python -m terakoya ARGUMENTS` in `processes` processes that find each other, and waits for them.

    Signals are passed on. Each process gets an equal share of the cores as threads, unless OMP_NUM_THREADS is set:
    more threads than cores are many times slower. Of a process that a signal ended this says so, since it cannot, and
    whether the kernel was out of memory. Returns the first failure's exit code, else 0.
    """
    kills = killed.memory_kills()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes))),
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "terakoya", *arguments],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # signals come from here alone, once each
        )
        for rank in range(processes)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(children, kills)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _wait(children: Sequence[subprocess.Popen[bytes]], kills: Mapping[str, int]) -> int:
    """The first failure's exit code, else 0, once all have ended. After a failure the others have `GRACE_SECONDS` to
    notice by themselves, as many again after a SIGTERM, and are then killed. `kills` is what `killed.memory_kills`
    counted before the start."""
    failed = 0
    ends = [(signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 2 * GRACE_SECONDS)]
    since = 0.0
    while True:
        codes = [child.poll() for child in children]  # of all: a generator would stop at the first that runs
        if not failed:
            rank, failed = next(((rank, code) for rank, code in enumerate(codes) if code), (0, 0))
            since = time.monotonic()
            if failed and (said := killed.explained(rank, failed, kills, killed.memory_kills())):
                error_console().print(said, markup=False, soft_wrap=True)
        elif ends and time.monotonic() - since > ends[0][1]:
            number, _ = ends.pop(0)
            for child in children:
                if child.poll() is None:
                    child.send_signal(number)
        if None not in codes:
            return failed
        time.sleep(0.05)

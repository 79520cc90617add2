"""Starts several processes on this machine when no launcher did."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from terakoya.distributed.signals import STOP_SIGNALS
from terakoya.errors import RankLostError, Stopped
from terakoya.launch import oom_killer
from terakoya.log import error_console
from terakoya.process_pool import LAUNCHER_VARIABLE, SAID_VARIABLE, available_cores, start_child

GRACE_SECONDS = 15.0
"""How long the other processes may run after one has failed, before they are terminated."""
LOST_GRACE_SECONDS = 5.0
"""The same after one has given up waiting for another, which the others then have, too."""


def run_processes(arguments: Sequence[str], processes: int, *, module: str = "terakoya", quiet: bool = False) -> int:
    """Runs `python -m MODULE ARGUMENTS` in `processes` processes that form one process group, and waits for them.

    Forwards stop signals; if this process is killed, the processes receive SIGTERM. Each process gets an equal share of
    the cores as threads, unless OMP_NUM_THREADS is set: more threads than cores are many times slower. An error that
    several processes meet is printed by one of them; `quiet` processes print nothing. Prints a message about a process
    that a signal ended, and whether the kernel was out of memory. Returns an exit code, see `_code`.
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
        LAUNCHER_VARIABLE: str(os.getpid()),
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}),
    }
    with contextlib.suppress(OSError):  # without a place for it, each process prints the error
        common[SAID_VARIABLE] = tempfile.mkdtemp(prefix="terakoya-said-")
    children: list[subprocess.Popen[Any]] = []
    forwarded: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.append(number)
        for child in children:
            child.send_signal(number)

    handlers = {
        number: signal.signal(number, forward)
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM)  # nohup: SIGHUP
    }
    try:
        for rank in range(processes):
            child = start_child(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if quiet else None,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,  # each signal then arrives once, through `forward`
            )
            children.append(child)
            for number in forwarded[:1]:  # it came before there was this child
                child.send_signal(number)
        return _code(_wait(children, kills_before, forwarded), forwarded)
    finally:
        if SAID_VARIABLE in common:
            shutil.rmtree(common[SAID_VARIABLE], ignore_errors=True)
        for child in children:
            child.kill()
            child.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(
    children: Sequence[subprocess.Popen[Any]], kills_before: Mapping[str, int], forwarded: Sequence[int]
) -> list[int]:
    """Waits for all children; returns the codes of those that failed, in that order, but not of those
    that were ended from here. After a failure the others have
    `GRACE_SECONDS` to notice it, as long again after a SIGTERM, and are then killed. `kills_before` holds the counts of
    `count_oom_kills` before the start, `forwarded` the signals that were sent to all."""
    failed: dict[int, int] = {}
    last_words, sent = [signal.SIGTERM, signal.SIGKILL], list(forwarded)
    deadline, grace = float("inf"), GRACE_SECONDS
    while True:
        codes = [child.poll() for child in children]  # a list: a generator would stop at the first child that runs
        for rank, code in enumerate(codes):
            if not code or rank in failed or (failed and -code in sent):
                continue
            if not failed:
                grace = LOST_GRACE_SECONDS if code == RankLostError.exit_code else GRACE_SECONDS
                deadline = time.monotonic() + grace
            failed[rank] = code
            if code < 0 and -code not in forwarded:
                message = oom_killer.explain_exit(rank, code, kills_before, oom_killer.count_oom_kills())
                error_console().print(message, markup=False, soft_wrap=True)
        if None not in codes:
            return list(failed.values())
        if last_words and time.monotonic() > deadline:
            sent.append(last_words.pop(0))
            deadline = time.monotonic() + grace
            for child in children:
                child.send_signal(sent[-1])
        time.sleep(0.05)


def _code(failed: Sequence[int], forwarded: Sequence[int]) -> int:
    """Returns one exit code for all processes, of which those with the codes `failed` failed, in that order.

    It is that of the first one that did not only lose another; 128 plus the signal's number if a signal ended it, but
    `Stopped`'s if all that failed were ended by a stop signal before they could handle it; 0 if none failed.
    """
    if not failed:
        return 0
    if all(code == Stopped.exit_code or -code in forwarded for code in failed):
        return Stopped.exit_code
    first = next((code for code in failed if code != RankLostError.exit_code), RankLostError.exit_code)
    return first if first > 0 else 128 - first

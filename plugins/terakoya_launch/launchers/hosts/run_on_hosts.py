"""Runs commands on several hosts together: prints their lines, stops them and returns an exit code."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from terakoya.errors import LASTING_EXIT_CODES, RankLostError, Stopped
from terakoya.process_pool import start_child

STOPPED = Stopped.exit_code
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

logger = logging.getLogger("terakoya")

GRACE_SECONDS = 60.0
"""How long the other hosts may continue after one has failed, before they receive a stop request."""
LOST_GRACE_SECONDS = 10.0
"""The same after one has waited in vain for another."""
STOP_SECONDS = 30.0
"""Timeout of the stop command of one host."""


@dataclass(frozen=True)
class RemoteCommand:
    """Two shell commands for `host`: one that runs something there, and one that sends it a stop request."""

    host: str
    command: str
    stop: str


def run_on_hosts(
    remotes: Sequence[RemoteCommand],
    *,
    continue_after_failure: bool = False,
    first_is_needed: bool = True,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Runs all commands together and prints each line after `[HOST]`; returns the first failure's exit code, else 0. A
    failure that came of the loss of another host counts only where there is no other.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 send a stop request to every host; the function waits until all have ended.
    After one host fails, the others have `grace_seconds` to notice it and then receive a stop request. With
    `continue_after_failure` a failed host is only logged, and the exit code is that of the first host, where the others
    rendezvous; where that host failed, too, it is that of one that has failed on what a user has to mend, if any.
    Without `first_is_needed` they rendezvous elsewhere: the exit code is 0 if any host ended with 0, else that of the
    last one that failed.
    """
    running = [
        start_child(  # a host whose connection ends with this process saves and ends
            ["bash", "-c", remote.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C must not close connections: hosts get a stop request below
        )
        for remote in remotes
    ]
    readers = []
    for remote, process in zip(remotes, running, strict=True):
        assert process.stdout is not None
        readers.append(threading.Thread(target=_show, args=(remote.host, process.stdout), daemon=True))
        readers[-1].start()
    interrupted = threading.Event()
    handlers = {
        number: signal.signal(number, lambda *_: interrupted.set())
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM)  # nohup: SIGHUP
    }
    try:
        grace = None if continue_after_failure else grace_seconds
        return _wait(remotes, running, interrupted, grace, first_is_needed=first_is_needed)
    finally:
        for reader, process in zip(readers, running, strict=True):
            if process.poll() is None:
                process.kill()
            process.wait()
            reader.join(timeout=5)  # a process that outlives the connection may hold the pipe open
            if not reader.is_alive():
                process.stdout.close()  # type: ignore[union-attr]
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(
    remotes: Sequence[RemoteCommand],
    running: Sequence[subprocess.Popen[str]],
    interrupted: threading.Event,
    grace_seconds: float | None,
    *,
    first_is_needed: bool,
) -> int:
    """Waits for all; returns the exit code. With `grace_seconds` None the others continue after a failure."""
    failed: list[int] = []  # in the order of failing
    deadline = float("inf")
    stop_sent = False
    while True:
        ended = None not in [process.poll() for process in running]  # polls all
        for index, process in enumerate(running):
            if process.returncode and index not in failed:
                failed.append(index)
                if grace_seconds is not None:
                    lost = process.returncode == RankLostError.exit_code
                    grace = min(grace_seconds, LOST_GRACE_SECONDS) if lost else grace_seconds
                    deadline = min(deadline, time.monotonic() + grace)
                elif not ended and not stop_sent and process.returncode != STOPPED:
                    logger.warning(
                        "%s ended with exit code %d; the others continue", remotes[index].host, process.returncode
                    )
        if ended:
            break
        if not stop_sent and (interrupted.is_set() or time.monotonic() > deadline):
            stop_sent = True
            logger.warning("sending a stop request to all hosts")
            for remote, process in zip(remotes, running, strict=True):
                if process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # the host cannot be reached
                        subprocess.run(
                            ["bash", "-c", remote.stop], check=False, stdin=subprocess.DEVNULL, timeout=STOP_SECONDS
                        )
        time.sleep(0.1)
    codes = [int(running[index].returncode) for index in failed]
    if grace_seconds is None:
        returned = [int(process.returncode) for process in running]
        decides = returned[0] if first_is_needed else 0 if 0 in returned else codes[-1]
        return next((code for code in codes if code in LASTING_EXIT_CODES), decides) if decides else 0
    return next((code for code in codes if code != RankLostError.exit_code), codes[0] if codes else 0)


def _show(host: str, lines: IO[str]) -> None:
    with contextlib.suppress(ValueError):  # closed while being read
        for line in lines:
            sys.stdout.write(f"[{host}] {line}")
            sys.stdout.flush()

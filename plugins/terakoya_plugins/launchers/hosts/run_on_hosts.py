"""Commands on several hosts, started together: what they say, how they are stopped, and how they end."""

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

from terakoya.errors import Stopped

STOPPED = Stopped.exit_code

logger = logging.getLogger("terakoya")

GRACE_SECONDS = 60.0
"""How long the others may go on after one host has failed before they are asked to leave."""
STOP_SECONDS = 30.0
"""How long asking one host may take."""


@dataclass(frozen=True)
class Remote:
    """A command that runs something on `host`, and one that asks it to stop; lines for a shell."""

    host: str
    command: str
    stop: str


def run_together(remotes: Sequence[Remote], *, others_go_on: bool = False, grace_seconds: float = GRACE_SECONDS) -> int:
    """Runs all commands at once, each line that comes behind `[HOST]`; returns the first failure's exit code, else 0.

    Ctrl-C and SIGTERM ask every host to stop, and the wait goes on until all have. When one fails the others have
    `grace_seconds` to notice by themselves and are then asked to stop; unless `others_go_on`: then a host that fails is
    told of, and the exit code is that of the first host, where the others meet.
    """
    running = [
        subprocess.Popen(
            ["bash", "-c", remote.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends no connection: the hosts are told below, and go on talking
        )
        for remote in remotes
    ]
    readers = []
    for remote, process in zip(remotes, running, strict=True):
        assert process.stdout is not None
        readers.append(threading.Thread(target=_show, args=(remote.host, process.stdout), daemon=True))
        readers[-1].start()
    asked = threading.Event()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(remotes, running, asked, None if others_go_on else grace_seconds)
    finally:
        for reader, process in zip(readers, running, strict=True):
            if process.poll() is None:
                process.kill()
            process.wait()
            reader.join(timeout=5)  # something that outlives the connection may hold its end open
            if not reader.is_alive():
                process.stdout.close()  # type: ignore[union-attr]
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    remotes: Sequence[Remote],
    running: Sequence[subprocess.Popen[str]],
    asked: threading.Event,
    grace_seconds: float | None,
) -> int:
    """The exit code once all have ended; `grace_seconds` None is for others that go on without one that failed."""
    failed: list[int] = []  # in the order of failing
    patience_ends = float("inf")
    told = False
    while True:
        ended = None not in [process.poll() for process in running]  # all are asked
        for index, process in enumerate(running):
            if process.returncode and index not in failed:
                failed.append(index)
                if grace_seconds is not None:
                    patience_ends = min(patience_ends, time.monotonic() + grace_seconds)
                elif not ended and not told and process.returncode != STOPPED:
                    logger.warning("%s has ended with %d; the others go on", remotes[index].host, process.returncode)
        if ended:
            break
        if not told and (asked.is_set() or time.monotonic() > patience_ends):
            told = True
            logger.warning("asking all hosts to save and leave")
            for remote, process in zip(remotes, running, strict=True):
                if process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # a host that is not reached
                        subprocess.run(
                            ["bash", "-c", remote.stop], check=False, stdin=subprocess.DEVNULL, timeout=STOP_SECONDS
                        )
        time.sleep(0.1)
    if grace_seconds is None:
        return int(running[0].returncode)
    return int(running[failed[0]].returncode) if failed else 0


def _show(host: str, lines: IO[str]) -> None:
    with contextlib.suppress(ValueError):  # closed while it was read
        for line in lines:
            sys.stdout.write(f"[{host}] {line}")
            sys.stdout.flush()

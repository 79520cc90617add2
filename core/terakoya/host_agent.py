"""torchrun for one host, as scripts start it: `python -m terakoya.host_agent TORCHRUN'S ARGUMENTS`.

It asks the processes to save and leave when it is itself asked to, and ends with their exit code. torchrun by itself
then ends with a traceback and with 1, as after a crash, whatever its processes have made of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from terakoya.training.signals import STOPPED, STOPPED_NOTE

WISHES = (signal.SIGTERM, signal.SIGINT)
BEFORE = 128 + signal.SIGTERM
"""Exit code of a start that was asked to leave before there was anything to save."""
PATIENCE = 5.0
"""Seconds without a process after which one that was asked waits no longer for other hosts to start with."""


def run(arguments: Sequence[str]) -> int:
    """Runs torchrun with `arguments`; returns 0, `STOPPED` if its processes were asked to stop and saved, or what the
    first of them that failed ended with, 128 and the signal's number if one killed it."""
    folder = Path(tempfile.mkdtemp())
    note = folder / "stopped"
    os.environ[STOPPED_NOTE] = str(note)
    threading.Thread(target=_pass_on, args=(note, _heard()), name="terakoya-wishes", daemon=True).start()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.main(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
        return STOPPED if note.exists() else 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        sys.stderr.write(f"rank {rank} ended with {code}, the first here that failed\n")
        return int(code)
    finally:
        shutil.rmtree(folder)


def _heard() -> int:
    """What the numbers of signals are read from: at once, also while the main thread waits for other hosts in C++."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in WISHES:
        signal.signal(number, lambda *_: None)
    return reading


def _pass_on(note: Path, heard: int) -> None:
    """Asks all processes for what this one is asked for: each time, and those that torchrun starts anew after one that
    died before it could heed it. Ends this process where there are none, and `note` says of none that it has saved."""
    told: set[int] = set()
    seen: float | None = None  # when there was a process; None: nobody has asked for anything
    while True:
        if select.select([heard], [], [], None if seen is None else 0.2)[0] and set(os.read(heard, 64)) & set(WISHES):
            told.clear()
            seen = seen or time.monotonic() - PATIENCE
        if seen is None:
            continue
        there = {each.pid for each in psutil.Process().children()}
        for process in there - told:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGTERM)
        told |= there
        if there or note.exists():
            seen = time.monotonic()
        elif time.monotonic() - seen >= PATIENCE:
            shutil.rmtree(note.parent, ignore_errors=True)
            os._exit(BEFORE)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

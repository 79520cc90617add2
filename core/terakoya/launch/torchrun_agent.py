"""torchrun for one host, as scripts start it: `python -m terakoya.launch.torchrun_agent TORCHRUN'S ARGUMENTS`.

It asks the processes to save and leave when it is itself asked to, kills those that are still there after
`TORCH_ELASTIC_SHUTDOWN_TIMEOUT` seconds, and ends with their exit code. torchrun by itself then ends with a traceback
and with 1, as after a crash, whatever its processes have made of it.
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
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from terakoya.training.distributed.signals import ENDED_NOTE, STOPPED

WISHES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BEFORE = 128 + signal.SIGTERM
"""Exit code of a start that was asked to leave before there was anything to save."""
PATIENCE = 5.0
"""Seconds without a process after which one that was asked waits no longer for other hosts to start with."""
SAVING_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""The variable that says how long processes that were asked may take before they are killed; torchrun's own, where one
has failed and the others save. Its default is 30, ours 900."""


def run(arguments: Sequence[str]) -> int:
    """Runs torchrun with `arguments`; returns 0, `STOPPED` if its processes were asked to stop and saved, or what the
    first of them that failed ended with, 128 and the signal's number if one killed it."""
    note = Path(tempfile.mkdtemp()) / "ended"
    os.environ[ENDED_NOTE] = str(note)
    os.environ.setdefault(SAVING_VARIABLE, "900")
    wishes = Wishes(note)
    wishes.start()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.main(["--signals-to-handle", "SIGQUIT", *arguments])
        return STOPPED if note.exists() and note.read_text() == str(STOPPED) else 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        sys.stderr.write(f"rank {rank} ended with {code}, the first here that failed\n")
        return int(code)
    finally:
        wishes.over()
        _send(signal.SIGKILL, _children())  # one that was being started when there was nobody to ask
        shutil.rmtree(note.parent, ignore_errors=True)


class Wishes:
    """What this process is asked for, which a thread passes on: the main one may wait for other hosts, in C++.

    Attributes:
        note: the file in which a process says how it has ended.
    """

    def __init__(self, note: Path) -> None:
        self.note = note
        self._leaving = False
        self._heard, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        for number in WISHES:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a script's own background
                signal.signal(number, self._in_main_thread)

    def start(self) -> None:
        """Begins to pass on."""
        threading.Thread(target=self._pass_on, name="terakoya-wishes", daemon=True).start()

    def over(self) -> None:
        """From now on nothing is heeded: how the processes have ended is known."""
        for number in WISHES:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _in_main_thread(self, *_: object) -> None:
        if self._leaving:
            raise SystemExit(BEFORE)

    def _pass_on(self) -> None:
        """Asks all processes: each time, and those that torchrun starts anew after one that died before it could heed
        it. Leaves where there are none and none has said that it ended."""
        told: set[int] = set()
        seen = deadline = 0.0  # when there was a process, and when those that were asked are killed
        while True:
            if self._asked(None if not deadline else 0.2):
                told.clear()
                deadline = deadline or time.monotonic() + float(os.environ[SAVING_VARIABLE])
            if not deadline:
                continue
            there = _children()
            _send(signal.SIGTERM, there - told)
            told |= there
            if there and time.monotonic() > deadline:
                _send(signal.SIGKILL, there)
            elif there or self.note.exists():
                seen = time.monotonic()
            elif time.monotonic() - seen > PATIENCE:
                self._leave()

    def _asked(self, seconds: float | None) -> bool:
        """Whether somebody has asked, within so many seconds."""
        return bool(select.select([self._heard], [], [], seconds)[0] and set(os.read(self._heard, 64)) & set(WISHES))

    def _leave(self) -> None:
        """Ends the main thread's wait, or, where it does not hear of it, this process."""
        self._leaving = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2.0)
        _send(signal.SIGKILL, _children())
        os._exit(BEFORE)


def _children() -> set[int]:
    while True:
        with contextlib.suppress(psutil.Error):  # another process's, that cannot be read at the moment
            return {each.pid for each in psutil.Process().children()}
        time.sleep(0.1)


def _send(number: signal.Signals, processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

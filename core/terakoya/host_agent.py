"""torchrun for one host, as scripts start it: `python -m terakoya.host_agent TORCHRUN'S ARGUMENTS`.

It asks the processes to save and leave when it is itself asked to, and ends with their exit code. torchrun by itself
then ends with a traceback and with 1, as after a crash, whatever its processes have made of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from terakoya.training.signals import STOPPED, STOPPED_NOTE

BEFORE = 128 + signal.SIGTERM
"""Exit code of a start that was asked to leave before there was anything to save."""
PATIENCE = 5.0
"""Seconds without a process after which there is nothing to ask, and nothing that would start one is waited for."""


def run(arguments: Sequence[str]) -> int:
    """Runs torchrun with `arguments`; returns 0, `STOPPED` if its processes were asked to stop and saved, or what the
    first of them that failed ended with, 128 and the signal's number if one killed it."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "stopped"
        os.environ[STOPPED_NOTE] = str(note)
        wish = Wish(note)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: wish.tell())
        try:
            torchrun.main(["--signals-to-handle", "SIGHUP,SIGQUIT", *arguments])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
            sys.stderr.write(f"rank {rank} ended with {code}, the first here that failed\n")
            return int(code)
        return STOPPED if note.exists() else 0


class Wish:
    """A wish to save and leave, told to every process that there is, and to those that torchrun starts later.

    Attributes:
        note: the file that a process makes when it has saved and leaves.
    """

    def __init__(self, note: Path) -> None:
        self.note = note
        self._told: set[int] = set()
        self._teller: threading.Thread | None = None

    def tell(self) -> None:
        """Asks all processes; to be called by the main thread.

        Raises:
            SystemExit: there are none.
        """
        there = _children()
        if not there and not self.note.exists():
            raise SystemExit(BEFORE)
        self._ask(there)
        if self._teller is None:
            self._teller = threading.Thread(target=self._stay, name="terakoya-wish", daemon=True)
            self._teller.start()

    def _ask(self, processes: Sequence[int]) -> None:
        for process in processes:
            self._told.add(process)
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGTERM)

    def _stay(self) -> None:
        """Asks those that are started anew, after one that died before it could heed; ends a wait for other hosts."""
        since = time.monotonic()
        while True:
            there = _children()
            self._ask([each for each in there if each not in self._told])
            if there or self.note.exists():
                since = time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                os.kill(os.getpid(), signal.SIGTERM)  # the main thread finds nobody to tell
                return
            time.sleep(0.2)


def _children() -> list[int]:
    import psutil

    return [each.pid for each in psutil.Process().children()]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""Ctrl-C and SIGTERM as a wish to save and leave; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Self

STOPPED = 75
"""Exit code of a run that was asked to stop, saved and left (EX_TEMPFAIL: start it again to go on)."""


STOPPED_NOTE = "TERAKOYA_STOPPED_NOTE"
"""The variable in which whoever starts processes through torchrun names a file, for them to say there that they were
stopped."""


def stopped_code(environment: Mapping[str, str] = os.environ) -> int:
    """The exit code of such a run: `STOPPED`; 0 under a torchrun that would take any other for a crash and start it
    again, and where the file of `STOPPED_NOTE` says it, which is made."""
    if STOPPED_NOTE in environment:
        Path(environment[STOPPED_NOTE]).touch()
        return 0
    return 0 if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else STOPPED


def leave() -> None:
    """From now on this process, which has done what it was asked for, cannot be killed by being asked once more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class StopRequest:
    """Whether this process was asked to stop, by signals that it heeds from `listen` on until it is closed.

    Several processes are not asked at the same moment: a run that stops is closed when all have left, so that who is
    asked late is not killed in the midst of what the others wait for.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self) -> None:
        """From now on a signal is a wish; in the main thread, which alone can say so. What an earlier start has said in
        the file of `STOPPED_NOTE` is taken back: torchrun stops all to begin anew with a host more."""
        if STOPPED_NOTE in os.environ:
            Path(os.environ[STOPPED_NOTE]).unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._asked)

    def close(self) -> None:
        """From now on signals do what they did before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

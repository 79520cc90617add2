"""Ctrl-C and SIGTERM as a wish to save and leave; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Self

from terakoya.errors import Stopped

STOPPED_EXIT_CODE = Stopped.exit_code
"""Exit code of a run that was asked to stop, saved and left (EX_TEMPFAIL: start it again to go on)."""

EXIT_CODE_FILE_VARIABLE = "TERAKOYA_ENDED_NOTE"
"""The variable in which whoever starts processes through torchrun names a file, for them to write there which exit code
they would have."""


def exit_code(*, stopped: bool, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code of a run that has finished (0) or was `stopped` on request (`STOPPED_EXIT_CODE`).

    It is always 0 under a torchrun with restarts, which would take another code for a crash and start the run again,
    and where `EXIT_CODE_FILE_VARIABLE` names a file: the code is then written into the file.
    """
    code = STOPPED_EXIT_CODE if stopped else 0
    if EXIT_CODE_FILE_VARIABLE in environment:
        note = Path(environment[EXIT_CODE_FILE_VARIABLE])
        note.parent.mkdir(parents=True, exist_ok=True)  # nobody has used it for as long as the run took
        note.write_text(str(code))
        return 0
    return 0 if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else code


def ignore_stop_signals() -> None:
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
        the file of `EXIT_CODE_FILE_VARIABLE` is taken back: torchrun stops all to begin anew with a host more."""
        if EXIT_CODE_FILE_VARIABLE in os.environ:
            Path(os.environ[EXIT_CODE_FILE_VARIABLE]).unlink(missing_ok=True)
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

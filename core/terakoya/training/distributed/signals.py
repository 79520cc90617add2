"""Ctrl-C and SIGTERM as a request to save and stop; a second Ctrl-C stops at once."""

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
"""Exit code of a run that saved and stopped on request (EX_TEMPFAIL: start it again to continue)."""

EXIT_CODE_FILE_VARIABLE = "TERAKOYA_ENDED_NOTE"
"""The variable that names a file to which processes under torchrun write the exit code that they would have had."""


def exit_code(*, stopped: bool, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code of a run that has finished (0) or was `stopped` on request (`STOPPED_EXIT_CODE`).

    It is always 0 under a torchrun with restarts, which would take another code for a crash and start the run again,
    and where `EXIT_CODE_FILE_VARIABLE` names a file: the code is then written into the file.
    """
    code = STOPPED_EXIT_CODE if stopped else 0
    if EXIT_CODE_FILE_VARIABLE in environment:
        file = Path(environment[EXIT_CODE_FILE_VARIABLE])
        file.parent.mkdir(parents=True, exist_ok=True)  # a clean-up may have removed it during a long run
        file.write_text(str(code))
        return 0
    return 0 if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else code


def ignore_stop_signals() -> None:
    """Makes this process, which has saved and is about to exit, ignore a further SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class StopRequest:
    """Whether this process was requested to stop, by a signal between `listen` and `close`.

    Several processes do not receive the signal at the same moment. A run that stops therefore closes this only when all
    processes have left the loop: a late signal must not kill a process while the others wait for its part of the save.

    Attributes:
        signal: name of the signal that requested the stop; None while there was none.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self) -> None:
        """From now on a signal is a stop request. Only the main thread can install handlers; others do nothing.

        Removes the file of `EXIT_CODE_FILE_VARIABLE` that an earlier start may have written: torchrun also stops all
        processes in order to start again with one more host.
        """
        if EXIT_CODE_FILE_VARIABLE in os.environ:
            Path(os.environ[EXIT_CODE_FILE_VARIABLE]).unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        """From now on signals have the effect that they had before `listen`."""
        while self._previous_handlers:
            number, handler = self._previous_handlers.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

"""Ctrl-C and SIGTERM as a wish to save and leave; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Self

STOPPED = 75
"""Exit code of a run that was asked to stop, saved and left (EX_TEMPFAIL: start it again to go on)."""


def stopped_code(environment: Mapping[str, str] = os.environ) -> int:
    """The exit code of such a run: `STOPPED`, or 0 under a torchrun that would take any other for a crash and start it
    again."""
    return 0 if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else STOPPED


class StopRequest:
    """Whether this process was asked to stop. Handlers stand while the context is open."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

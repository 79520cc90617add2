"""Signals as requests to save and stop. A second Ctrl-C leaves without saving; one during start-up, or when all steps
are saved, leaves at once.

Handlers of Python run in the main thread only, which may wait for other processes in C++ for minutes. A thread
therefore says what happens, and leaves where the main thread cannot.

See docs/design/stopping.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from terakoya.errors import Stopped

STOPPED_EXIT_CODE = Stopped.exit_code
"""Exit code of a run that saved and stopped on request (EX_TEMPFAIL: start it again to continue)."""
LEFT_EXIT_CODE = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C, which does not wait for a save."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a scheduler's request, a terminal that was closed, and what clusters send before a time limit."""

EXIT_CODE_FILE_VARIABLE = "TERAKOYA_ENDED_NOTE"
"""The variable that names a file to which processes under torchrun write the exit code that they would have had."""

LASTING_CODE_FILE_VARIABLE = "TERAKOYA_LASTING_CODE_FILE"
"""The variable that names a file to which a process writes its exit code if that is one of `LASTING_EXIT_CODES`. srun
returns the highest code of all processes, which is that of those that only lost this one."""

SAME_PRESS_SECONDS = 1.0
"""A second SIGINT within this time counts as the first: a terminal and a launcher may both deliver one Ctrl-C."""
LEAVE_SECONDS = 5.0
"""How long the main thread may take to leave after a second Ctrl-C, before the process ends."""


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
    """Makes this process, which has saved and is about to exit, ignore further stop signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Outlook:
    """What stopping means for a run at this moment.

    Attributes:
        seconds: how long the step under way still takes, about; None where that is not known.
        saving: the step whose checkpoint is being written; None where none is.
        unsaved_steps: steps that would be lost without another save.
        saved_step: the step of the last checkpoint; None without one.
    """

    seconds: float | None
    saving: int | None
    unsaved_steps: int
    saved_step: int | None

    def after_request(self, name: str) -> str:
        """Returns what happens after the first signal, which is called `name`."""
        if self.saving is not None:
            text = f"{name}: step {self.saving:,} is being saved, then the run stops"
        else:
            about = "" if self.seconds is None else f" (about {max(1, round(self.seconds))} s)"
            text = f"{name}: saving after this step{about}"
        return text + ("; again to leave without saving" if name == "SIGINT" else "")

    def after_leaving(self) -> str:
        """Returns what a run that leaves now loses."""
        steps = f"{self.unsaved_steps:,} step{'s' if self.unsaved_steps != 1 else ''}"
        if self.saved_step is None:
            return f"left without saving: {steps} lost, there is no checkpoint yet; the same command begins again"
        return (
            f"left without saving: {steps} since the checkpoint of step {self.saved_step:,} lost; the same command "
            "continues from there"
        )


class StopRequest:
    """Whether this process was requested to stop, by a signal between `listen` and `close`.

    Several processes do not receive the signal at the same moment. A run that stops therefore closes this only when all
    processes have left the loop: a late signal must not kill a process while the others wait for its part of the save.

    Attributes:
        signal: name of the signal that requested the stop; None while there was none.
        outlook: returns what stopping would mean now; None before the first step.
        say: prints a line for the user.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.outlook: Callable[[], Outlook] | None = None
        self.say: Callable[[str], None] = _print_on_rank_0
        self._leave_at_once: Callable[[str], None] | None = None  # says so
        self._may_leave_at_once = self._leaving = False
        self._closed = threading.Event()
        self._previous_handlers: dict[int, object] = {}
        self._previous_fd = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leave_during_start(self) -> None:
        """From now on, until `listen`, a signal ends this process at once: nothing was trained that could be saved.

        For processes of the command line alone.
        """
        self._may_leave_at_once, self._leave_at_once = True, self._say_start
        self._install()

    def listen(self) -> None:
        """From now on a signal is a stop request. Only the main thread can install handlers; others do nothing."""
        self._leave_at_once = None
        self._install()

    def leave_after_the_end(self, say: Callable[[str], None]) -> None:
        """From now on a signal ends this process at once, after `say` with its name: all steps are saved. In a program
        of somebody's own, which never called `leave_during_start`, it has the effect that it had before `listen`."""
        if self._may_leave_at_once:
            self._leave_at_once = say
        else:
            self.close()

    def close(self) -> None:
        """From now on signals have the effect that they had before."""
        while self._previous_handlers:
            number, handler = self._previous_handlers.popitem()
            if signal.getsignal(number) == self._handle:  # and not ignored by now
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._closed.set()
        if self._pipe is not None and self._thread is not None:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._pipe[1])  # the thread ends
            # A thread that is inside torch while Python ends aborts the process, as the last one to hold the model.
            self._thread.join(LEAVE_SECONDS)
            self._pipe = self._thread = self.outlook = self._leave_at_once = None

    def _install(self) -> None:
        """Installs the handlers and starts the thread, once.

        Removes the file of `EXIT_CODE_FILE_VARIABLE` that an earlier start may have written: torchrun also stops all
        processes in order to start again with one more host.
        """
        if self._previous_handlers or threading.current_thread() is not threading.main_thread():
            return
        if EXIT_CODE_FILE_VARIABLE in os.environ:
            Path(os.environ[EXIT_CODE_FILE_VARIABLE]).unlink(missing_ok=True)
        self._closed.clear()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._thread = threading.Thread(target=self._react, args=(self._pipe[0],), name="signals", daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)  # nohup ignores SIGHUP

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, as soon as that runs Python."""
        if self._leaving and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None and self._leave_at_once is None:
            self.signal = signal.Signals(number).name

    def _react(self, pipe: int) -> None:
        """Runs in the thread: says what a signal does, and leaves where that is what it does."""
        first = 0.0
        while number := os.read(pipe, 1):
            if number[0] not in STOP_SIGNALS or self._leaving:
                continue
            name, now = signal.Signals(number[0]).name, time.monotonic()
            if self._leave_at_once is not None:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    self._leave_at_once(name)
                os._exit(exit_code(stopped=True))
            outlook = self.outlook() if self.outlook is not None else None
            if not first:
                first = now
                if outlook is not None:
                    self._tell(outlook.after_request(name))
            elif number[0] == signal.SIGINT and now - first > SAME_PRESS_SECONDS:
                if outlook is not None and outlook.saving is not None:
                    self._tell(f"SIGINT: step {outlook.saving:,} is being saved; the run leaves once that is complete")
                else:
                    self._leave(outlook)
        os.close(pipe)

    def _say_start(self, name: str) -> None:
        self.say(f"{name} during start-up: nothing is lost, and the same command continues")

    def _leave(self, outlook: Outlook | None) -> None:
        """Leaves without another save: through the main thread, and without it if it hangs."""
        self._leaving = True
        if outlook is not None:
            self._tell(outlook.after_leaving())
        os.kill(os.getpid(), signal.SIGINT)  # raises KeyboardInterrupt in the main thread
        if not self._closed.wait(LEAVE_SECONDS):
            os._exit(LEFT_EXIT_CODE)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self.say(text)


def _print_on_rank_0(text: str) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

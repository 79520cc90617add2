"""The log of a run: `metrics.jsonl`, the terminal, and trackers behind queues, so that none can stall the loop."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from terakoya.components import Tracker
from terakoya.errors import Stopped, UserError, describe_error
from terakoya.log import new_console, status_line, translated, visible
from terakoya.runs.folder import lock_run
from terakoya.runs.metrics import FILE
from terakoya.training.screen import StepTable, StepView, progress_bar, validation_lines

log = logging.getLogger("terakoya")
QUEUE_LENGTH = 10_000
PENDING_BYTES = 1 << 20
"""How much of `metrics.jsonl` is kept for later while the disk is full."""
ROW_SECONDS, BAR_SECONDS, LINE_SECONDS = 1.0, 0.1, 10.0
"""The shortest time between two rows of the table, two updates of the bar, and two lines of a log file."""
SECONDS_TO_FINISH = 10.0
"""How long the end of a run waits for all its trackers together."""


class RunLog:
    """Writes the log of a run on rank 0; on other ranks, where it is not `active`, every call does nothing.

    A disk that is full or fails does not end the run: what could not be written to `metrics.jsonl` is written later.
    `write` and `warn` may be called by several threads: savers and a `places.Keeper` warn from theirs.
    """

    def __init__(
        self, folder: Path, trackers: Sequence[Tracker], parameters: Mapping[str, Any], *, active: bool
    ) -> None:
        self.active = active
        self.console = new_console(stderr=True, quiet=not active)
        self.file: FileIO | None = None
        self.lock = threading.RLock()  # of the file and of the three below; a warning may be written while one is
        self.pending = bytearray()
        self.failing = False
        self.missing = 0
        self.trackers = [_TrackerThread(tracker, folder, parameters) for tracker in trackers] if active else []
        if active:
            self.file = _open_for_appending(folder / FILE)
        self.line_shown = self.row_shown = self.bar_shown = -math.inf
        self.on_terminal = sys.stderr.isatty()
        self.table = StepTable()

    def write(self, kind: str, **values: Any) -> None:
        """Appends one object to `metrics.jsonl`; numbers that JSON cannot represent (NaN) become null."""
        clean = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        line = json.dumps({"kind": kind, **clean, "time": round(time.time(), 3)}, ensure_ascii=False) + "\n"
        with self.lock:
            if self.file is None:
                return
            if len(self.pending) < PENDING_BYTES:
                self.pending += line.encode()
            else:
                self.missing += 1
            self._write_pending()

    def _write_pending(self) -> None:
        assert self.file is not None
        try:
            while self.pending:
                del self.pending[: self.file.write(self.pending)]
        except OSError as error:
            if not self.failing:
                self.print(
                    f"warning: {FILE} cannot be written ({error.strerror}); the run continues, and writes it later"
                )
            self.failing = True
            return
        if self.failing:
            self.failing, missing, self.missing = False, self.missing, 0
            text = f"{missing:,} records of {FILE} are missing" if missing else f"nothing of {FILE} is missing"
            self.warn(f"the disk takes {FILE} again: {text}")

    def sync(self) -> None:
        """Flushes `metrics.jsonl` to disk, so that a power cut leaves the records of all saved steps."""
        if self.file is not None:
            try:
                os.fsync(self.file)
            except OSError as error:
                self.print(f"warning: {FILE} was not flushed to disk ({error.strerror}); the run continues")

    def begin_tracking(self, step: int, *, attempt: int) -> None:
        """Tells every tracker that the steps after `step` come next, in this `attempt`; see `TrackerRun`."""
        for tracker in self.trackers:
            tracker.queue.put((step, attempt))  # however long the queue is

    def track(self, step: int, values: Mapping[str, float] | Mapping[str, str]) -> None:
        """Queues numbers for every tracker, or texts for those that show them, without waiting."""
        for tracker in self.trackers:
            tracker.put(step, values)

    def print(self, text: str) -> None:
        """Prints a line, above the progress line."""
        # an OSError: the terminal was closed; the run saves then, and must not fail before
        with contextlib.suppress(OSError), status_line.hide():
            self.console.print(text, markup=False, soft_wrap=not self.on_terminal)  # a terminal gets whole words

    def warn(self, text: str, **values: Any) -> None:
        """Prints a warning and writes it to `metrics.jsonl`."""
        self.write("warning", text=text, **values)
        self.print(f"{translated('warning')}: {translated(text)}")

    def show_step(self, view: StepView, *, last: bool = False) -> None:
        """Shows a logged step: on a terminal as a row of a table, at most one a second, above a progress bar; elsewhere
        as a line, at most every ten seconds. The `last` step of a run is always shown."""
        if not self.active:
            return
        now = time.monotonic()
        if not self.on_terminal:
            if last or now - self.line_shown >= LINE_SECONDS:
                self.line_shown = now
                self.print(view.line)
            return
        width = self.console.width - 1
        if last or now - self.row_shown >= ROW_SECONDS:
            self.row_shown = now
            header, row = self.table.lines(view.cells, width)
            with contextlib.suppress(OSError), status_line.hide():
                if header is not None:
                    self.console.print(header, markup=False, soft_wrap=True, style="bold")
                self.console.print(row, markup=False, soft_wrap=True)
        if last or now - self.bar_shown >= BAR_SECONDS:
            self.bar_shown = now
            with contextlib.suppress(OSError):
                status_line.show(
                    "" if last else visible(progress_bar(view.share, [*map(translated, view.parts)], width))
                )

    def show_validation(self, step: int, stores: Mapping[str, Mapping[str, float]]) -> None:
        """Shows the numbers of each validation store, one line a store."""
        if self.on_terminal:
            lines = validation_lines(step, stores, self.console.width - 1)
        else:
            numbers = {
                store: "  ".join(f"{translated(name)} {value:.4f}" for name, value in values.items())
                for store, values in stores.items()
            }
            lines = [f"step {step:,}  validation on {store}: {shown}" for store, shown in numbers.items()]
        for line in lines:
            self.print(line)

    def close(self) -> None:
        """Waits a few seconds for all trackers to finish, then abandons those that have not."""
        with contextlib.suppress(OSError):
            status_line.show("")
        for tracker in self.trackers:
            tracker.queue.put(None)
        deadline = time.monotonic() + SECONDS_TO_FINISH
        for tracker in self.trackers:
            tracker.wait_until(deadline)
        with self.lock:
            if self.file is None:
                return
            self._write_pending()
            if self.pending:
                missing = self.missing + self.pending.count(b"\n")
                self.print(f"warning: the last {missing:,} records of {FILE} are missing")
            self.sync()
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


@contextlib.contextmanager
def recorded_refusal(folder: Path) -> Iterator[None]:
    """Writes why the block refuses to start a run to `metrics.jsonl`, if `folder` has one and no process uses it."""
    try:
        yield
    except Stopped:
        raise
    except UserError as error:
        with contextlib.suppress(OSError, UserError):
            if (folder / FILE).is_file():
                handle = lock_run(folder / "run.lock")
                try:
                    run_log = RunLog(folder, (), {}, active=True)
                    run_log.write("error", step=None, text=describe_error(error))
                    run_log.close()
                finally:
                    os.close(handle)
        raise


def _open_for_appending(file: Path) -> FileIO:
    """Opens `file` for appending, after removing the unfinished last line of a run that was killed."""
    if file.is_file():
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    return file.open("ab", buffering=0)


_Item = tuple[int, Mapping[str, float] | Mapping[str, str] | int]
"""A step with its values, or the step after which an attempt begins with the attempt's number."""


class _TrackerThread:
    """Runs one tracker in its own thread: a slow one misses values, a broken one is switched off with one warning."""

    def __init__(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        self.name = type(tracker).__name__
        self.queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()  # None: the tracker finishes
        self.dropped = 0
        self.off = False
        self.thread = threading.Thread(
            target=self._run, args=(tracker, folder, parameters), name=f"tracker {self.name}", daemon=True
        )
        self.thread.start()

    def put(self, step: int, values: Mapping[str, float] | Mapping[str, str]) -> None:
        """Queues `values` if there is room; never waits."""
        if self.off or self.queue.qsize() >= QUEUE_LENGTH:
            self.dropped += 1
        else:
            self.queue.put((step, values))

    def wait_until(self, deadline: float) -> None:
        """Waits for the tracker, whose queue has ended, until `time.monotonic()` reaches `deadline`; warns if it missed
        values."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        missing = self.dropped + max(0, self.queue.qsize() - 1)
        if self.thread.is_alive() or (missing and not self.off):
            log.warning("tracker %s fell behind; %s has every number it misses", self.name, FILE)
        elif missing:
            log.warning("tracker %s was off and misses %d reports; %s has their numbers", self.name, missing, FILE)

    def _run(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        try:
            opened = tracker.open(folder, parameters)
            log_text, begin = getattr(opened, "log_text", None), getattr(opened, "begin", None)
            while (item := self.queue.get()) is not None:
                step, values = item
                if isinstance(values, int):
                    if begin is not None:
                        begin(step, values)
                    continue
                for name, value in values.items():
                    if isinstance(value, str) and log_text is not None:
                        log_text(step, name, value)
                if numbers := {name: value for name, value in values.items() if not isinstance(value, str)}:
                    opened.log(step, numbers)
            opened.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - training continues whatever a tracker raises
            self.off = True
            log.warning(
                "tracker %s: %s: %s; it is off for the rest of this run", self.name, type(error).__name__, error
            )

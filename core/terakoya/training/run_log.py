"""The log of a run: `metrics.jsonl`, the terminal, and trackers behind queues, so that none can stall the loop."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from terakoya.components import Tracker
from terakoya.runs.metrics import FILE

log = logging.getLogger("terakoya")
QUEUE_LENGTH = 10_000
SECONDS_TO_FINISH = 10.0
"""How long the end of a run waits for all its trackers together."""


class RunLog:
    """Writes the log of a run on rank 0; on other ranks, where it is not `active`, every call does nothing."""

    def __init__(
        self, folder: Path, trackers: Sequence[Tracker], parameters: Mapping[str, Any], *, active: bool
    ) -> None:
        self.active = active
        self.console = Console(stderr=True, quiet=not active, highlight=False)
        self.file: IO[str] | None = None
        self.trackers = [_TrackerThread(tracker, folder, parameters) for tracker in trackers] if active else []
        if active:
            self.file = _open_for_appending(folder / FILE)
        self.progress_shown = 0.0
        self.on_terminal = sys.stderr.isatty()

    def write(self, kind: str, **values: Any) -> None:
        """Appends one object to `metrics.jsonl`; numbers that JSON cannot represent (NaN) become null."""
        if self.file is None:
            return
        clean = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self.file.write(json.dumps({"kind": kind, **clean, "time": round(time.time(), 3)}, ensure_ascii=False) + "\n")
        self.file.flush()

    def track(self, step: int, values: Mapping[str, float]) -> None:
        """Queues `values` for every tracker, without waiting."""
        for tracker in self.trackers:
            tracker.put(step, values)

    def print(self, text: str) -> None:
        """Prints a line, above the progress line."""
        if self.active and self.on_terminal and self.progress_shown:
            self.console.file.write("\r\x1b[K")
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str, **values: Any) -> None:
        """Prints a warning and writes it to `metrics.jsonl`."""
        self.write("warning", text=text, **values)
        self.print(f"warning: {text}")

    def show_progress(self, text: str, *, last: bool = False) -> None:
        """Replaces the progress line on a terminal; elsewhere prints an ordinary line, at most every ten seconds."""
        now = time.monotonic()
        if not self.active or (now - self.progress_shown < (0.1 if self.on_terminal else 10.0) and not last):
            return
        self.progress_shown = now
        if self.on_terminal:
            width = self.console.width - 1
            self.console.file.write("\r\x1b[K" + text[:width] + ("\n" if last else ""))
            self.console.file.flush()
        else:
            self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Waits a few seconds for all trackers to finish, then abandons those that have not."""
        for tracker in self.trackers:
            tracker.request_finish()
        deadline = time.monotonic() + SECONDS_TO_FINISH
        for tracker in self.trackers:
            tracker.wait_until(deadline)
        if self.file is not None:
            self.file.close()
            self.file = None


def _open_for_appending(file: Path) -> IO[str]:
    """Opens `file` for appending, after removing the unfinished last line of a run that was killed."""
    if file.is_file():
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    return file.open("a", encoding="utf-8")


class _TrackerThread:
    """Runs one tracker in its own thread: a slow one misses values, a broken one is switched off with one warning."""

    def __init__(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        self.name = type(tracker).__name__
        self.queue: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(QUEUE_LENGTH)
        self.dropped = 0
        self.off = False
        self.finish_requested = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(tracker, folder, parameters), name=f"tracker {self.name}", daemon=True
        )
        self.thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queues `values` if there is room; never waits."""
        if self.off:
            return
        try:
            self.queue.put_nowait((step, values))
        except queue.Full:
            self.dropped += 1

    def request_finish(self) -> None:
        """Makes the tracker close once its queue is empty."""
        self.finish_requested.set()

    def wait_until(self, deadline: float) -> None:
        """Waits for the tracker until `time.monotonic()` reaches `deadline`; warns if it missed values."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        missing = self.dropped + self.queue.qsize()
        if self.thread.is_alive() or (missing and not self.off):
            log.warning("tracker %s fell behind; metrics.jsonl has every number it misses", self.name)

    def _run(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        try:
            opened = tracker.open(folder, parameters)
            while (item := self._next()) is not None:
                opened.log(*item)
            opened.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - training continues whatever a tracker raises
            self.off = True
            log.warning(
                "tracker %s: %s: %s; it is off for the rest of this run", self.name, type(error).__name__, error
            )

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        """Returns the next queued values; None once the queue is empty and the tracker must finish."""
        while True:
            try:
                return self.queue.get(timeout=0.1)
            except queue.Empty:
                if self.finish_requested.is_set():
                    return None

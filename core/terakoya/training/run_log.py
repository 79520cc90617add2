"""What a run writes down: `metrics.jsonl`, one live line, and trackers behind a queue that can never stall the loop."""

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
"""How long the end of a run waits for all of its trackers."""


class RunLog:
    """The record of a run, kept by rank 0; on other ranks every call does nothing."""

    def __init__(
        self, folder: Path, trackers: Sequence[Tracker], parameters: Mapping[str, Any], *, active: bool
    ) -> None:
        self.active = active
        self.console = Console(stderr=True, quiet=not active, highlight=False)
        self.file: IO[str] | None = None
        self.trackers = [_Queued(tracker, folder, parameters) for tracker in trackers] if active else []
        if active:
            self.file = _opened(folder / FILE)
        self.shown = 0.0
        self.live = sys.stderr.isatty()

    def write(self, kind: str, **values: Any) -> None:
        """Appends one object to `metrics.jsonl`; numbers that JSON has not (NaN) become null."""
        if self.file is None:
            return
        clean = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self.file.write(json.dumps({"kind": kind, **clean, "time": round(time.time(), 3)}, ensure_ascii=False) + "\n")
        self.file.flush()

    def track(self, step: int, values: Mapping[str, float]) -> None:
        """Hands `values` to every tracker without waiting."""
        for tracker in self.trackers:
            tracker.put(step, values)

    def print(self, text: str) -> None:
        """A line that stays."""
        if self.active and self.live and self.shown:
            self.console.file.write("\r\x1b[K")
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str, **values: Any) -> None:
        """A warning: printed and written down."""
        self.write("warning", text=text, **values)
        self.print(f"warning: {text}")

    def show_progress(self, text: str, *, last: bool = False) -> None:
        """The one live line; where the output is no terminal, a plain line at most every ten seconds."""
        now = time.monotonic()
        if not self.active or (now - self.shown < (0.1 if self.live else 10.0) and not last):
            return
        self.shown = now
        if self.live:
            width = self.console.width - 1
            self.console.file.write("\r\x1b[K" + text[:width] + ("\n" if last else ""))
            self.console.file.flush()
        else:
            self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Lets all trackers finish together for a few seconds, then leaves them."""
        for tracker in self.trackers:
            tracker.ask_to_finish()
        until = time.monotonic() + SECONDS_TO_FINISH
        for tracker in self.trackers:
            tracker.leave(until)
        if self.file is not None:
            self.file.close()
            self.file = None


def _opened(file: Path) -> IO[str]:
    """`file` for writing on, without what a run that was killed left of its last line."""
    if file.is_file():
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    return file.open("a", encoding="utf-8")


class _Queued:
    """One tracker in a thread of its own: slow ones fall behind, broken ones are dropped with one warning."""

    def __init__(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        self.name = type(tracker).__name__
        self.queue: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue(QUEUE_LENGTH)
        self.dropped = 0
        self.off = False
        self.ended = threading.Event()
        self.thread = threading.Thread(
            target=self._work, args=(tracker, folder, parameters), name=f"tracker {self.name}", daemon=True
        )
        self.thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Hands `values` over where there is room; never waits."""
        if self.off:
            return
        try:
            self.queue.put_nowait((step, values))
        except queue.Full:
            self.dropped += 1

    def ask_to_finish(self) -> None:
        """Lets the tracker end when it has taken what is queued."""
        self.ended.set()

    def leave(self, until: float) -> None:
        """Waits for that until the clock `time.monotonic` says `until`; says so if numbers are missing."""
        self.thread.join(max(0.0, until - time.monotonic()))
        missing = self.dropped + self.queue.qsize()
        if self.thread.is_alive() or (missing and not self.off):
            log.warning("tracker %s fell behind; metrics.jsonl has every number it misses", self.name)

    def _work(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        try:
            opened = tracker.open(folder, parameters)
            while (item := self._next()) is not None:
                opened.log(*item)
            opened.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            self.off = True
            log.warning(
                "tracker %s: %s: %s; it is off for the rest of this run", self.name, type(error).__name__, error
            )

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        """What is queued next; None when there is nothing more to come."""
        while True:
            try:
                return self.queue.get(timeout=0.1)
            except queue.Empty:
                if self.ended.is_set():
                    return None

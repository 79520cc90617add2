"""What a run writes down: `metrics.jsonl`, one live line, and trackers behind a queue that can never stall the loop."""

from __future__ import annotations

import json
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from terakoya.components import Tracker, TrackerRun

log = logging.getLogger("terakoya")
QUEUE_LENGTH = 10_000


class Record:
    """The record of a run, kept by rank 0; on other ranks every call does nothing."""

    def __init__(
        self, folder: Path, trackers: Sequence[Tracker], parameters: Mapping[str, Any], *, active: bool
    ) -> None:
        self.active = active
        self.console = Console(stderr=True, quiet=not active, highlight=False)
        self.file: IO[str] | None = None
        self.trackers = [_Queued(tracker, folder, parameters) for tracker in trackers] if active else []
        if active:
            self.file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
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

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.active and self.live and self.shown:
            self.console.file.write("\r\x1b[K")
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str, **values: Any) -> None:
        """A warning: printed and written down."""
        self.write("warning", text=text, **values)
        self.say(f"warning: {text}")

    def progress(self, text: str, *, last: bool = False) -> None:
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
        """Lets trackers finish for a few seconds, then leaves them."""
        for tracker in self.trackers:
            tracker.close()
        if self.file is not None:
            self.file.close()
            self.file = None


class _Queued:
    """One tracker in a thread of its own: slow ones fall behind, broken ones are dropped with one warning."""

    def __init__(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        self.name = type(tracker).__name__
        self.queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUE_LENGTH)
        self.dropped = 0
        self.thread = threading.Thread(
            target=self._work, args=(tracker, folder, parameters), name=f"tracker {self.name}", daemon=True
        )
        self.thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self.queue.put_nowait((step, values))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        try:
            self.queue.put(None, timeout=5.0)
        except queue.Full:
            self.dropped += self.queue.qsize()
        self.thread.join(10.0)
        if self.dropped or self.thread.is_alive():
            log.warning("tracker %s fell behind; metrics.jsonl has every number it misses", self.name)

    def _work(self, tracker: Tracker, folder: Path, parameters: Mapping[str, Any]) -> None:
        opened: TrackerRun | None = None
        try:
            opened = tracker.open(folder, parameters)
            while (item := self.queue.get()) is not None:
                opened.log(*item)
            opened.close()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            log.warning(
                "tracker %s: %s: %s; it is off for the rest of this run", self.name, type(error).__name__, error
            )
            while self.queue.get() is not None:
                self.dropped += 1

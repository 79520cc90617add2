"""Mirrors a run's folder to an object store in a thread: checkpoints once they are committed, and the other files.

The thread reads the folder alone, in which every checkpoint is whole or not there; the training does not wait for it,
and nothing that fails here ends it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from terakoya.errors import TemporaryFailure, UserError
from terakoya.log import hide_secrets
from terakoya.runs.checkpoints import MANIFEST, DamagedError
from terakoya_places import run_objects
from terakoya_places.object_folder import ObjectFolder

log = logging.getLogger("terakoya")
POLL_SECONDS = 1.0
"""How often the thread looks for a new checkpoint."""
FILES_SECONDS = 60.0
"""How often other files, such as `metrics.jsonl`, are sent between checkpoints; and at most a tenth of the time."""
RETRY_SECONDS = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""The pauses after failures in a row; the last one stays."""
LAST_ATTEMPTS = 7
"""The end of a run gives up after so many failures in a row, with 232 seconds between the first and the last."""


class TakenOver(UserError):  # noqa: N818 - what happened
    """Another process writes to the run's address now."""


class Mirror:
    """Sends the folder of a run to `store` until it is closed. Rank 0 has one.

    Attributes:
        say: receives warnings; may be called by the thread.
        lost: why nothing is sent any more: another process has taken the address over.
    """

    def __init__(self, store: ObjectFolder, folder: Path, *, keep: int) -> None:
        self.store, self.folder, self.keep = store, folder, keep
        self.say: Callable[[str], None] = log.warning
        self.lost: TakenOver | None = None
        self.writer = uuid.uuid4().hex
        self._sent: dict[str, int] = {}  # checkpoints in the store: name -> mtime of the manifest here
        self._damaged: set[tuple[str, int]] = set()
        self._files: dict[str, tuple[int, int]] = {}  # other files in the store: name -> size and mtime when sent
        self._files_due = 0.0
        self._failures, self._error = 0, ""
        self._closing = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="terakoya-mirror", daemon=True)

    def take_over(self) -> None:
        """Becomes the process that writes to the address. Raises UserError where the store cannot be written to."""
        record = {"writer": self.writer, "host": socket.gethostname(), "process": os.getpid()}
        try:
            self.store.write(run_objects.WRITER, json.dumps(record).encode())
        except FileNotFoundError:
            raise UserError(f"{self.store}: expected an address that can be written to, found no such bucket") from None

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def finish(self) -> None:
        """Lets the thread end once all is sent, or the store has refused it `LAST_ATTEMPTS` times in a row."""
        self._closing, self._failures = True, 0
        self._wake.set()

    def has_ended(self, seconds: float) -> bool:
        """Waits up to `seconds` for the thread to end; returns whether it has."""
        return self._ended.wait(seconds)

    def missing(self) -> list[str]:
        """Returns what of the folder is not in the store."""
        checkpoints = [name for name, time in self._checkpoints().items() if self._sent.get(name) != time]
        return checkpoints + [name for name, facts in self._other_files().items() if self._files.get(name) != facts]

    def outcome(self) -> UserError | None:
        """Returns the error that ends the command where something is missing in the store."""
        if self.lost is not None:
            return self.lost
        if not (missing := self.missing()):
            return None
        return TemporaryFailure(
            f"{self.store}: not mirrored: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''} "
            f"({self._error or 'still being sent'}); all of it is in {self.folder}, and the same command sends the rest"
        )

    # --------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while self.lost is None:
                closing = self._closing
                if self._attempt(closing) and closing:
                    return
                if closing and self._failures >= LAST_ATTEMPTS:
                    return
                self._wake.wait(self._pause())
                self._wake.clear()
        finally:
            self._ended.set()

    def _pause(self) -> float:
        return RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS)) - 1] if self._failures else POLL_SECONDS

    def _attempt(self, closing: bool) -> bool:
        """Sends what has changed; returns whether the store has all of it now."""
        try:
            self._send_changes(closing)
        except TakenOver as error:
            self.lost = error
            self.say(str(error))
            return False
        except Exception as error:  # noqa: BLE001 - whatever a library raises, a mirror that has ended would be missed
            known = isinstance(error, UserError | OSError)  # OSError: a file here was removed, or its disk fails
            shown = str(error) if known else hide_secrets(f"{self.store}: {type(error).__name__}: {error}")
            self._failures, self._error = self._failures + 1, shown
            if self._failures & (self._failures - 1) == 0:  # the first, second, fourth, eighth, ...
                self.say(f"{shown}; the run continues, and the mirror tries again in {self._pause():g} s")
            return False
        if self._failures:
            self.say(f"{self.store} takes files again after {self._failures} failed attempts")
        self._failures, self._error = 0, ""
        return True

    def _send_changes(self, closing: bool) -> None:
        here = self._checkpoints()
        new = [
            name for name, time in here.items() if self._sent.get(name) != time and (name, time) not in self._damaged
        ]
        gone = [name for name in self._sent if name not in here]
        if not (new or gone or closing or time.monotonic() >= self._files_due):
            return
        self._check_writer()
        self._send_files()
        if not (new or gone):
            return
        sizes = self.store.sizes()
        for name in gone:
            self._remove(name, sizes)
            del self._sent[name]
        for name in reversed(new):
            self._send_checkpoint(name, here[name], sizes)
        self._prune(sizes)

    def _send_checkpoint(self, name: str, time: int, sizes: run_objects.Sizes) -> None:
        folder = self.folder / name
        try:
            self._check_writer()
            there = f"{name}/{MANIFEST}" in sizes and self.store.read(f"{name}/{MANIFEST}")
            if there != (folder / MANIFEST).read_bytes():
                run_objects.send_checkpoint(self.store, folder, name, sizes)
            self._sent[name] = time
        except DamagedError as error:
            if (folder / MANIFEST).exists():
                self._damaged.add((name, time))
                self.say(f"{error}; it is not mirrored")
        except FileNotFoundError:
            if (folder / MANIFEST).exists():
                raise  # else it was pruned here while it was sent, and is removed there as any that is gone
            self._sent[name] = time

    def _prune(self, sizes: run_objects.Sizes) -> None:
        """Removes checkpoints there that are older than all here, once there are enough of those."""
        here = run_objects.checkpoint_steps(self._sent)
        if len(here) < self.keep:
            return
        names = {name.rpartition("/")[0] for name in sizes if name.startswith(f"{run_objects.CHECKPOINTS}/")}
        steps = run_objects.checkpoint_steps(str(PurePosixPath(*PurePosixPath(name).parts[:2])) for name in names)
        for step, name in steps.items():
            if step < min(here):
                self._remove(name, sizes)

    def _remove(self, name: str, sizes: run_objects.Sizes) -> None:
        self._check_writer()  # sending takes long, and another process may need this checkpoint by now
        run_objects.remove_checkpoint(self.store, name, sizes)

    def _send_files(self) -> None:
        start = time.monotonic()
        for name, facts in self._other_files().items():
            if self._files.get(name) != facts:
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    self.store.upload(self.folder / name, name)
                    self._files[name] = facts
        now = time.monotonic()
        self._files_due = now + max(FILES_SECONDS, 10 * (now - start))

    def _check_writer(self) -> None:
        try:
            record = json.loads(self.store.read(run_objects.WRITER))
        except (FileNotFoundError, ValueError):
            record = {}
        if record.get("writer") != self.writer:
            who = f"process {record['process']} on {record['host']}" if "host" in record else "another process"
            raise TakenOver(
                f"{self.store}: {who} has taken this run over; nothing more is mirrored from here, where the run "
                f"stays in {self.folder}: end one of the two"
            )

    # ---------------------------------------------------------------------------------------------- what is to be sent

    def _checkpoints(self) -> dict[str, int]:
        """The committed checkpoints here: name -> mtime of the manifest. The newest one is the last."""
        found = {}
        for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
            for path in self.folder.glob(pattern):
                name = PurePosixPath(path.parent.relative_to(self.folder))
                if not run_objects.is_own(name):
                    with contextlib.suppress(FileNotFoundError):
                        found[str(name)] = path.stat().st_mtime_ns
        return dict(sorted(found.items(), key=lambda each: (each[0].startswith(run_objects.CHECKPOINTS), each[0])))

    def _other_files(self) -> dict[str, tuple[int, int]]:
        """The other files here: name -> size and mtime."""
        folders = {self.folder / name for name in self._checkpoints()} | {self.folder / run_objects.CHECKPOINTS}
        found = {}
        for place, names, files in os.walk(self.folder):
            names[:] = [each for each in names if Path(place, each) not in folders and not each.startswith(".")]
            for each in files:
                name = PurePosixPath(Path(place, each).relative_to(self.folder))
                if not run_objects.is_own(name):
                    with contextlib.suppress(FileNotFoundError):
                        facts = Path(place, each).stat()
                        found[str(name)] = (facts.st_size, facts.st_mtime_ns)
        return found

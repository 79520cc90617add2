"""Mirrors a run's folder to an object store in a thread: checkpoints once they are committed, and the other files.

The thread reads the folder alone, in which every checkpoint is whole or not there; the training does not wait for it,
and nothing that fails here ends it.

See docs/design/object-stores.md.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path, PurePosixPath

from terakoya.atomic_files import write_text
from terakoya.errors import TemporaryFailure, UserError
from terakoya.log import hide_secrets
from terakoya.object_store import ObjectFolder
from terakoya.runs import mirrored
from terakoya.runs.checkpoints import MANIFEST, DamagedError, find_newest_whole
from terakoya.training.checkpoint.recovery import move_to_quarantine
from terakoya.training.distributed.context import DistributedContext

log = logging.getLogger("terakoya")
POLL_SECONDS = 1.0
"""How often the thread looks for a new checkpoint."""
FILES_SECONDS = 60.0
"""How often other files, such as `metrics.jsonl`, are sent between checkpoints; and at most a tenth of the time."""
RETRY_SECONDS = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""The pauses after failures in a row; the last one stays."""
LAST_ATTEMPTS = 7
"""The end of a run gives up after so many failures in a row, with 232 seconds between the first and the last."""
ERROR_SECONDS = 10.0
"""How long a run that ends with an error waits for what is being sent."""
RECORD = "mirror.json"
"""The file in a work folder that names the address it is mirrored to."""


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
            self.store.write(mirrored.WRITER, json.dumps(record).encode())
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

    def _send_checkpoint(self, name: str, time: int, sizes: mirrored.Sizes) -> None:
        folder = self.folder / name
        try:
            self._check_writer()
            there = f"{name}/{MANIFEST}" in sizes and self.store.read(f"{name}/{MANIFEST}")
            if there != (folder / MANIFEST).read_bytes():
                mirrored.send_checkpoint(self.store, folder, name, sizes)
            self._sent[name] = time
        except DamagedError as error:
            if (folder / MANIFEST).exists():
                self._damaged.add((name, time))
                self.say(f"{error}; it is not mirrored")
        except FileNotFoundError:
            if (folder / MANIFEST).exists():
                raise  # else it was pruned here while it was sent, and is removed there as any that is gone
            self._sent[name] = time

    def _prune(self, sizes: mirrored.Sizes) -> None:
        """Removes checkpoints there that are older than all here, once there are enough of those."""
        here = mirrored.checkpoint_steps(self._sent)
        if len(here) < self.keep:
            return
        names = {name.rpartition("/")[0] for name in sizes if name.startswith(f"{mirrored.CHECKPOINTS}/")}
        steps = mirrored.checkpoint_steps(str(PurePosixPath(*PurePosixPath(name).parts[:2])) for name in names)
        for step, name in steps.items():
            if step < min(here):
                self._remove(name, sizes)

    def _remove(self, name: str, sizes: mirrored.Sizes) -> None:
        self._check_writer()  # sending takes long, and another process may need this checkpoint by now
        mirrored.remove_checkpoint(self.store, name, sizes)

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
            record = json.loads(self.store.read(mirrored.WRITER))
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
                if not mirrored.is_own(name):
                    with contextlib.suppress(FileNotFoundError):
                        found[str(name)] = path.stat().st_mtime_ns
        return dict(sorted(found.items(), key=lambda each: (each[0].startswith(mirrored.CHECKPOINTS), each[0])))

    def _other_files(self) -> dict[str, tuple[int, int]]:
        """The other files here: name -> size and mtime."""
        folders = {self.folder / name for name in self._checkpoints()} | {self.folder / mirrored.CHECKPOINTS}
        found = {}
        for place, names, files in os.walk(self.folder):
            names[:] = [each for each in names if Path(place, each) not in folders and not each.startswith(".")]
            for each in files:
                name = PurePosixPath(Path(place, each).relative_to(self.folder))
                if not mirrored.is_own(name):
                    with contextlib.suppress(FileNotFoundError):
                        facts = Path(place, each).stat()
                        found[str(name)] = (facts.st_size, facts.st_mtime_ns)
        return found


# ------------------------------------------------------------------------------------------------------ start and end


@contextlib.contextmanager
def mirroring(
    address: str | None, out: Path, context: DistributedContext, *, keep: int, start_over: bool
) -> Iterator[Mirror | None]:
    """Mirrors the run in `out` to `address` while the block runs, and waits at its end for what is missing; collective.
    First fetches the newest whole checkpoint from there, if it is of a later step than those here.

    Yields the mirror on rank 0; None on other ranks, and without an address.

    Raises:
        UserError: on every rank: the store cannot be used, or none of its checkpoints is whole.
        TemporaryFailure: on every rank, at the end: something could not be mirrored.
    """
    if address is None:
        yield None
        return
    open_mirror = partial(_open, address, out, keep=keep, start_over=start_over)
    mirror = open_mirror() if context.world_size == 1 else _run_while_others_wait(context, address, open_mirror)
    try:
        yield mirror
    except BaseException:
        if mirror is not None:
            mirror.finish()
            mirror.has_ended(ERROR_SECONDS)
            if (error := mirror.outcome()) is not None:
                log.warning("%s", error)
        raise
    if mirror is not None:
        _write_report(out, mirror.say)
        mirror.finish()
    while not context.broadcast(mirror is not None and mirror.has_ended(POLL_SECONDS)):
        pass  # the others wait, as a launcher ends a process that stays alone
    error = context.broadcast(None if mirror is None else mirror.outcome())
    if error is not None:
        raise error
    if mirror is not None:
        log.info("%s: has all of the run", mirror.store)


def send_run(folder: Path, address: str, *, keep: int) -> None:
    """Sends what `address` lacks of the run in `folder`, which no process trains, and returns when all of it is there.

    Raises:
        UserError: the folder is mirrored to another address, or the store cannot be used.
        TemporaryFailure: something could not be sent.
    """
    store = ObjectFolder(address)
    _check_record(folder, store)
    mirror = Mirror(store, folder, keep=keep)
    mirror.take_over()
    mirror.start()
    mirror.finish()
    while not mirror.has_ended(POLL_SECONDS):
        pass
    if (error := mirror.outcome()) is not None:
        raise error


def _run_while_others_wait(context: DistributedContext, address: str, work: Callable[[], Mirror]) -> Mirror | None:
    """Does as `context.run_on_main`, for work that may take longer than ranks wait for each other."""
    with ThreadPoolExecutor(1, "terakoya-fetch") as pool:
        future = pool.submit(work) if context.is_main else None
        while not context.broadcast(future is not None and bool(wait([future], timeout=POLL_SECONDS).done)):
            pass
        return context.run_on_main(f"opening {address}", lambda: future.result() if future is not None else None)


def _open(address: str, out: Path, *, keep: int, start_over: bool) -> Mirror:
    store = ObjectFolder(address)
    _check_record(out, store)
    mirror = Mirror(store, out, keep=keep)
    mirror.take_over()  # first: a process that still writes there then removes nothing that is fetched here
    newest, damaged_here = find_newest_whole(out / mirrored.CHECKPOINTS)
    after = -1 if newest is None else int(newest.name.rpartition("-")[2])
    for folder in damaged_here:
        log.warning("%s is damaged; moved to %s", folder, move_to_quarantine(folder))
    fetched, damaged = mirrored.fetch_newest(store, out, store.sizes(), after=after)
    if damaged and fetched is None:  # or removed there since they were listed, by the process that wrote there
        fetched, damaged = mirrored.fetch_newest(store, out, store.sizes(), after=after)
    if damaged and fetched is None and newest is None and not start_over:
        raise UserError(
            f"{store}: this run has had checkpoints, and none of them is whole:\n  "
            + "\n  ".join(damaged.values())
            + "\nBring one back, or choose another --out; `terakoya train --start-over` trains from step 0"
        )
    if fetched is not None:
        _write_record(out, store, fetched=fetched.name)
        log.info("%s: fetched %s, from which the run continues in %s", store, fetched.name, out)
    else:
        log.info("%s: mirrored from %s", store, out)
    sizes = store.sizes() if damaged else {}
    for name, problem in damaged.items():
        log.warning("%s; removed from the store", problem)
        mirrored.remove_checkpoint(store, name, sizes)
    mirror.start()
    return mirror


def _check_record(out: Path, store: ObjectFolder) -> None:
    """Raises UserError if the work folder `out` belongs to another address."""
    file = out / RECORD
    with contextlib.suppress(FileNotFoundError, ValueError):
        address = json.loads(file.read_bytes()).get("address")
        if address != str(store):
            raise UserError(
                f"{out}: expected the work folder of {store}, got that of {address}; give each run a --work-folder of "
                "its own"
            )
        return
    _write_record(out, store)


def _write_record(out: Path, store: ObjectFolder, *, fetched: str | None = None) -> None:
    """Notes to which address the work folder `out` belongs, and for the scripts of launchers which of its checkpoints
    was fetched from there, not trained here."""
    write_text(out / RECORD, json.dumps({"address": str(store), "fetched": fetched}) + "\n")


def _write_report(out: Path, say: Callable[[str], None]) -> None:
    """Writes report.html into the run's folder."""
    from datetime import datetime

    from terakoya.runs.report import read_reports
    from terakoya.runs.report_page import render_page

    try:
        created = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        write_text(out / "report.html", render_page(read_reports([out], None), created=created, against="step"))
    except (UserError, OSError) as error:
        say(f"report.html was not written: {error}")

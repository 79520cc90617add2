"""The beginning and the end of a run at an address: what is fetched, who waits, and what is sent at last."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.atomic_files import write_text
from terakoya.errors import UserError
from terakoya.places import Keeper
from terakoya.plugins import registry
from terakoya.plugins.events import call
from terakoya.runs.checkpoints import find_newest_whole
from terakoya.training.checkpoint.recovery import move_to_quarantine
from terakoya_places import run_objects, sender
from terakoya_places.object_folder import ObjectFolder
from terakoya_places.sender import Mirror

if TYPE_CHECKING:
    from terakoya.distributed.context import DistributedContext

log = logging.getLogger("terakoya")
ERROR_SECONDS = 10.0
"""How long a run that ends with an error waits for what is being sent."""
END_SECONDS = 30 * 24 * 3600.0
"""How long ranks wait for what rank 0 does at the end: events of a finished run, and what is still to be sent."""
RECORD = "place.json"
"""The file in a work folder that names the address it is mirrored to."""


@contextlib.contextmanager
def keep_in_step(
    address: str, out: Path, context: DistributedContext, *, keep: int, start_over: bool
) -> Iterator[Keeper]:
    """Mirrors the run in `out` to `address` while the block runs, and waits at its end for what is missing; collective.
    First fetches the newest whole checkpoint from there, if it is of a later step than those here.

    Yields what receives the warnings of the mirror on rank 0.

    Raises:
        UserError: on every rank: the store cannot be used, or none of its checkpoints is whole.
        TemporaryFailure: on every rank, at the end: something could not be mirrored.
    """
    at_end = context.new_group(END_SECONDS)
    open_mirror = partial(_open, address, out, keep=keep, start_over=start_over)
    mirror = open_mirror() if context.world_size == 1 else _run_while_others_wait(context, address, open_mirror)
    keeper = Keeper()
    if mirror is not None:
        mirror.say = lambda text: keeper.say(text)
    try:
        yield keeper
    except BaseException:
        if mirror is not None:
            mirror.finish()
            mirror.has_ended(ERROR_SECONDS)
            if (error := mirror.outcome()) is not None:
                log.warning("%s", error)
        raise
    if mirror is not None:
        _write_files(out, mirror.say)
        mirror.finish()
    while not at_end.broadcast(mirror is not None and mirror.has_ended(sender.POLL_SECONDS)):
        pass  # the others wait, as a launcher ends a process that stays alone
    error = at_end.broadcast(None if mirror is None else mirror.outcome())
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
    while not mirror.has_ended(sender.POLL_SECONDS):
        pass
    if (error := mirror.outcome()) is not None:
        raise error


def _run_while_others_wait(context: DistributedContext, address: str, work: Callable[[], Mirror]) -> Mirror | None:
    """Does as `context.run_on_main`, for work that may take longer than ranks wait for each other."""
    with ThreadPoolExecutor(1, "terakoya-fetch") as pool:
        future = pool.submit(work) if context.is_main else None
        while not context.broadcast(future is not None and bool(wait([future], timeout=sender.POLL_SECONDS).done)):
            pass
        return context.run_on_main(f"opening {address}", lambda: future.result() if future is not None else None)


def _open(address: str, out: Path, *, keep: int, start_over: bool) -> Mirror:
    store = ObjectFolder(address)
    _check_record(out, store)
    mirror = Mirror(store, out, keep=keep)
    mirror.take_over()  # first: a process that still writes there then removes nothing that is fetched here
    if _recorded_address(out) is None:
        _write_record(out, store)
    newest, damaged_here = find_newest_whole(out / run_objects.CHECKPOINTS)
    after = -1 if newest is None else int(newest.name.rpartition("-")[2])
    for folder in damaged_here:
        log.warning("%s is damaged; moved to %s", folder, move_to_quarantine(folder))
    fetched, damaged = run_objects.fetch_newest(store, out, store.sizes(), after=after)
    if damaged and fetched is None:  # or removed there since they were listed, by the process that wrote there
        fetched, damaged = run_objects.fetch_newest(store, out, store.sizes(), after=after)
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
        run_objects.remove_checkpoint(store, name, sizes)
    mirror.start()
    return mirror


def _check_record(out: Path, store: ObjectFolder) -> None:
    if (address := _recorded_address(out)) not in (None, str(store)):
        raise UserError(
            f"{out}: expected the work folder of {store}, got that of {address}; give each run a --work-folder of its "
            "own"
        )


def _recorded_address(out: Path) -> str | None:
    try:
        address: str | None = json.loads((out / RECORD).read_bytes()).get("address")
    except (FileNotFoundError, ValueError):
        return None
    return address


def _write_record(out: Path, store: ObjectFolder, *, fetched: str | None = None) -> None:
    """Notes to which address the work folder `out` belongs, and for the scripts of launchers which of its checkpoints
    was fetched from there, not trained here."""
    write_text(out / RECORD, json.dumps({"address": str(store), "fetched": fetched}) + "\n")


def _write_files(out: Path, say: Callable[[str], None]) -> None:
    """Writes into the run's folder what plugins have for it."""
    for listener in registry().called["run_files"]:
        try:
            for result in call((listener,), folder=out)[0][1]:
                for name, text in result.items():
                    write_text(out / name, text)
        except (UserError, OSError) as error:
            say(f"what a plugin has for {out} was not written: {error}")

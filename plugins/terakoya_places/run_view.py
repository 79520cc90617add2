"""A run at an address as a folder of this machine: what `status` and `report` read of it, or one of its checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from terakoya.atomic_files import take_lock, wait_for_lock
from terakoya.errors import UserError
from terakoya.runs import metrics
from terakoya.runs.checkpoints import MANIFEST, folder_name
from terakoya_places import run_objects
from terakoya_places.object_folder import ObjectFolder, cache_folder, cache_name

QUIET_SECONDS = 600.0
"""A run whose log is older counts as one that no process trains: a mirror sends it every minute or so."""
ENDS = ("finished", "stopped", "error")
"""The kinds of records with which a process ends its part of the log."""


@contextlib.contextmanager
def viewing(store: ObjectFolder) -> Iterator[Path]:
    """Yields a folder with the log, the parameters and the manifests of a run; of other files of checkpoints it has the
    names and sizes alone.

    Raises:
        UserError: there is no run at an address, or it cannot be read.
        TemporaryFailure: the object store does not answer.
    """
    sizes = store.sizes()
    _check_run(store, sizes)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / PurePosixPath(store.address).name
        folder.mkdir()
        for name, size in sizes.items():
            path = PurePosixPath(name)
            if path.parts[0] == run_objects.CHECKPOINTS and not run_objects.is_own(path) and ".." not in path.parts:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with (folder / path).open("wb") as stream:
                    stream.truncate(size)
        wanted = {
            name: size
            for name, size in sizes.items()
            if name in (metrics.FILE, "parameters.json", "fork.json") or name.endswith(f"/{MANIFEST}")
        }
        run_objects.fetch_files(store, folder, wanted, manifests=True)
        for name in wanted:
            if name.endswith(MANIFEST) and (changed := store.find_time(name)) is not None and (folder / name).exists():
                os.utime(folder / name, (changed, changed))
        changed = store.find_time(metrics.FILE) if metrics.FILE in wanted else None
        records = metrics.read(folder).records if metrics.FILE in wanted else ()
        has_ended = bool(records) and records[-1].get("kind") in ENDS
        if changed is not None and time.time() - changed < QUIET_SECONDS and not has_ended:
            stack.callback(os.close, _hold_lock(store, folder))
        yield folder


def _hold_lock(store: ObjectFolder, folder: Path) -> int:
    """Locks the run's folder as the process that mirrors there locks its own, since the time at which that began to
    write there; returns the handle."""
    began = None
    try:
        record = json.loads(store.read(run_objects.WRITER))
        began = store.find_time(run_objects.WRITER)
    except (FileNotFoundError, ValueError):
        record = {}
    handle = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    take_lock(handle, fcntl.LOCK_EX, folder / "run.lock")
    os.write(handle, f"pid {record.get('process', '?')} on {record.get('host', 'another machine')}".encode())
    if began is not None:
        os.utime(handle, (began, began))
    return handle


def _check_run(store: ObjectFolder, sizes: Mapping[str, int]) -> None:
    if not run_objects.has_run(sizes):
        raise UserError(
            f"{store}: expected a run, as `terakoya train --out {store}` makes, found neither {metrics.FILE} nor a "
            "checkpoint there"
        )


def fetch_checkpoint(source: str) -> Path:
    """Returns the folder of this machine, in the user's cache, with the newest whole checkpoint of the run at the
    address `source`, or for RUN@STEP that of a step; fetches it where it is not here yet.

    Raises:
        UserError: there is no such checkpoint, or none is whole.
        TemporaryFailure: the object store does not answer.
    """
    address, step = source.rstrip("/"), None
    if "@" in (name := address.rpartition("/")[2]) and name.rpartition("@")[2].isdecimal():
        address, _, text = address.rpartition("@")
        step = int(text)
    store = ObjectFolder(address)
    sizes = store.sizes()
    _check_run(store, sizes)
    steps = run_objects.checkpoint_steps(run_objects.find_committed(sizes))
    if step is not None and step not in steps:
        raise UserError(
            f"{store}: expected a checkpoint of step {step:,}, found those of "
            f"{', '.join(f'{each:,}' for each in steps)}"
        )
    kept = cache_folder() / "checkpoints" / cache_name(store.address)
    problems = []
    for number in [step] if step is not None else reversed(steps):
        name = steps[number]
        folder = kept / run_objects.CHECKPOINTS / folder_name(number)
        try:
            with wait_for_lock(kept):
                if not folder.is_dir() or (folder / MANIFEST).read_bytes() != store.read(f"{name}/{MANIFEST}"):
                    shutil.rmtree(folder, ignore_errors=True)
                    run_objects.fetch_checkpoint(store, name, folder)
            return folder
        except (run_objects.DamagedError, FileNotFoundError) as error:
            problems.append(str(error))
    raise UserError(f"{store}: expected a whole checkpoint, found none:\n  " + "\n  ".join(problems or ["none there"]))

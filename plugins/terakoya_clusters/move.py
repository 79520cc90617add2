"""Moves a run: stops it where it trains, carries it where the next machines see it, and plans its start there.

Each step can be done again: what is stopped is not stopped twice, what is carried is whole in its place or
not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from terakoya.atomic_files import check_new_folder, copy_folder, new_folder
from terakoya.errors import UserError
from terakoya.folder_kinds import address_of, describe_found, is_address, kind_of
from terakoya.object_store import ObjectFolder
from terakoya.process_pool import is_alive
from terakoya.runs import files, metrics, mirrored
from terakoya.runs.checkpoints import DamagedError, find_newest_whole
from terakoya.runs.mirrored import work_folder_of
from terakoya.runs.remote_view import open_views
from terakoya.training.checkpoint.mirroring import send_run
from terakoya.training.run_folder import HOLDER
from terakoya_launch.jobs import find_job, find_plan_folder, poll_states
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, plan_launch
from terakoya_launch.submitted import SubmittedJobRecord

PARAMETERS = "parameters.json"
POLL_SECONDS = 2.0
LAUNCHER_SECONDS = 60.0
"""How long a launcher on this machine may take to end after its run."""
RECORD_BYTES = 1 << 16
"""How much of a log is read for its first record."""

Say = Callable[[str], None]


def move(
    run: Path,
    launcher: str,
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    lost: bool = False,
    say: Say,
    options: LaunchOptions,
) -> PlannedLaunch:
    """Stops `run`, carries it to `out`, and returns the plan that continues it there with `launcher`; see `plan_launch`
    for `settings` and `options`.

    Args:
        run: the run's folder, or its address.
        out: a new folder or an address for the run; default where it is.
        lost: whether the machine that trained is gone, so that nothing is stopped.
        say: receives a line about each step.

    Raises:
        UserError: the plan cannot be made, something else is at `out`, or a job goes on there, in which cases the run
            was not stopped; or a step failed.
    """
    out = run if out is None else out
    if is_address(run) and is_address(out) and address_of(run) != address_of(out):
        raise UserError(
            f"--out {address_of(out)}: expected a folder or {address_of(run)} itself; move the run to a folder first"
        )
    folder = options.folder or find_plan_folder(out)
    options = replace(options, folder=folder)
    with _parameters_of(run) as parameters:
        plan_launch(launcher, parameters, out, options, settings=settings, write=False)  # errors first
    check_target(run, out)
    if not lost:
        if not _is_same(run, out):
            check_no_job(out, folder)
        stop(run, say)
    with saying_where(run, say):
        carry(run, out, say)
    with saying_where(out, say), _parameters_of(out) as parameters:
        if is_address(out):
            folder.mkdir(parents=True, exist_ok=True)
            parameters = Path(shutil.copyfile(parameters, folder / PARAMETERS))
        return plan_launch(launcher, parameters, out, options, settings=settings)


@contextlib.contextmanager
def saying_where(place: Path, say: Say) -> Iterator[None]:
    """Says where the run stands if the block fails."""
    try:
        yield
    except (UserError, OSError):
        say(f"the run is stopped, and whole in {address_of(place)}; the same command goes on from there")
        raise


@contextlib.contextmanager
def _parameters_of(run: Path) -> Iterator[Path]:
    """Yields the parameter file of a run; of one at an address, a copy."""
    with open_views([run]) as (folder,):
        if not (folder / PARAMETERS).is_file():
            found = "none there" if is_address(run) else describe_found(run, "run")
            raise UserError(f"{address_of(run)}: expected a run with its {PARAMETERS}, got {found}")
        yield folder / PARAMETERS


# ------------------------------------------------------------------------------------------------------------- to stop


def stop(run: Path, say: Say) -> None:
    """Makes `run` save and end where it trains, and returns when it has: a submitted job, or a process of this machine.

    Raises:
        UserError: it trains where this machine cannot stop it; the message says what does.
    """
    record = SubmittedJobRecord.read(find_plan_folder(run))
    if record is not None:
        job, _ = find_job(record.launcher, str(run))
        if not job.state().done:
            say(job.stop())
            for state in poll_states(job, every=POLL_SECONDS):
                if state.done:
                    say(f"job {record.job}: {state.status}  {state.detail}".rstrip())
    folder = work_folder_of(run) if is_address(run) else run
    if (lock := files.read_lock(folder)).held:
        _stop_process(run, folder, lock.holder, say)
    elif is_address(run):
        with open_views([run]) as (view,):
            if (lock := files.read_lock(view)).held:
                _stop_process(run, view, lock.holder, say)


def _stop_process(run: Path, folder: Path, holder: str, say: Say) -> None:
    match = HOLDER.fullmatch(holder)
    if match is None or match[2] != socket.gethostname():
        how = f"`ssh {match[2]} kill {match[1]}` makes it save and end" if match else "make it save and end"
        raise UserError(
            f"{address_of(run)}: trains in {holder or 'another process'}, which this machine cannot stop: {how}; then "
            "give the same command again, with --lost where that machine is gone"
        )
    say(f"sent a stop request to process {match[1]}: it saves and ends")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(match[1]), signal.SIGTERM)
    if is_address(run) and folder != work_folder_of(run):  # a copy of what is there, whose lock nobody else holds
        while is_alive(int(match[1])):
            time.sleep(0.1)
    else:
        while files.read_lock(folder).held:
            time.sleep(0.1)
    deadline = time.monotonic() + LAUNCHER_SECONDS
    while match[3] and is_alive(int(match[3])) and time.monotonic() < deadline:
        time.sleep(0.1)  # its ports are free then


# ------------------------------------------------------------------------------------------------------------ to carry


def check_target(run: Path, out: Path) -> None:
    """Raises UserError where `run` cannot be carried to `out`: another run or something else is there."""
    if _is_same(run, out):
        return
    if is_address(out):
        sizes = ObjectFolder(out).sizes()
        has_run = metrics.FILE in sizes or bool(mirrored.checkpoint_steps(mirrored.find_committed(sizes)))
    else:
        has_run = kind_of(out) == "run"
    if has_run and _first_record(run) != _first_record(out):
        raise UserError(
            f"--out {address_of(out)}: expected a new place, or one to which {address_of(run)} was carried before, got "
            "another run; choose another --out"
        )
    if not is_address(out) and not (has_run and _listed_step(out) >= _listed_step(run)):
        check_new_folder(out)


def check_no_job(out: Path, folder: Path) -> None:
    """Raises UserError where a job that was submitted from the plan in `folder` goes on at `out`, as after an earlier
    move."""
    record = SubmittedJobRecord.read(folder)
    if record is None:
        return
    job, _ = find_job(record.launcher, str(folder))
    if not (state := job.state()).done:
        raise UserError(
            f"--out {address_of(out)}: job {record.job} was submitted for it before, and is there still "
            f"({state.status}); `terakoya launch {record.launcher} status {address_of(out)}` shows it; give --lost "
            "if it is gone"
        )


def carry(run: Path, out: Path, say: Say) -> None:
    """Copies the stopped `run` to `out`, whole or not at all; does nothing where all of it is there already, or where
    it has gone on there. `check_target` says whether it is another run that is there.

    Raises:
        UserError: `out` cannot be written, or the run has no whole checkpoint.
    """
    if _is_same(run, out):
        return
    step, there = _newest_step(run), _newest_step(out)
    if there > step or (there == step > 0 and not is_address(out)):  # an address may have a part of that step's files
        say(f"{address_of(out)}: has step {there:,} already")
        return
    if is_address(out):
        keep = files.read_parameters(run).get("checkpoint", {}).get("keep", 1)
        send_run(run, address_of(out), keep=keep)
    elif is_address(run):
        store = ObjectFolder(run)
        sizes = store.sizes()
        with new_folder(out) as draft:
            fetched, damaged = mirrored.fetch_newest(store, draft, sizes)
            if fetched is None:
                raise UserError(
                    f"{store}: expected a whole checkpoint, found none:\n  "
                    + "\n  ".join([*damaged.values()] or ["none there"])
                )
            committed = mirrored.find_committed(sizes)
            for name in sorted(set(committed) - set(mirrored.checkpoint_steps(committed).values())):
                try:
                    mirrored.fetch_checkpoint(store, name, draft / name)  # permanent ones, and the best
                except (DamagedError, FileNotFoundError) as error:
                    say(f"warning: {store}/{name} is left out, as it is not whole: {error}")
    else:
        with new_folder(out) as draft:
            copy_folder(run, draft)
            for name in mirrored.OWN_FILES:
                (draft / name).unlink(missing_ok=True)
            if _newest_step(draft) != step:
                raise UserError(f"{out}: another content arrived than was copied; check the disk and try again")
    say(f"{address_of(out)}: has all of the run; {address_of(run)} stays as it is, and can be removed once that trains")


def _is_same(run: Path, out: Path) -> bool:
    """Returns whether both are one folder or one address."""
    return address_of(run) == address_of(out) or (not is_address(out) and out.absolute() == run.absolute())


def _first_record(run: Path) -> bytes:
    """Returns the first line of the run's log, which tells it from other runs, as a log is only appended to; empty
    where there is none."""
    if is_address(run):
        store = ObjectFolder(run)
        size = min(RECORD_BYTES, store.sizes().get(metrics.FILE, 0))
        return store.read_range(metrics.FILE, 0, size).partition(b"\n")[0] if size else b""
    try:
        with (run / metrics.FILE).open("rb") as stream:
            return stream.read(RECORD_BYTES).partition(b"\n")[0]
    except FileNotFoundError:
        return b""


def _listed_step(run: Path) -> int:
    """Returns the step of the newest checkpoint in the folder or at the address, by its name; 0 if it has none."""
    if is_address(run):
        return max(mirrored.checkpoint_steps(mirrored.find_committed(ObjectFolder(run).sizes())), default=0)
    return max((each.step for each in files.find_checkpoints(run)), default=0)


def _newest_step(run: Path) -> int:
    """Returns the step of the newest whole checkpoint in the folder, or of the newest one at the address; 0 if it has
    none."""
    if is_address(run):
        return _listed_step(run)
    if kind_of(run) != "run":
        return 0
    newest, _ = find_newest_whole(run / mirrored.CHECKPOINTS)
    return 0 if newest is None else int(newest.name.rpartition("-")[2])

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
from terakoya.folder_kinds import describe_found, kind_of
from terakoya.places import as_written, is_local, open_views, place_of
from terakoya.process_pool import is_alive
from terakoya.runs import files, metrics
from terakoya.runs.checkpoints import find_newest_whole
from terakoya.runs.files import MACHINE_FILES
from terakoya.runs.folder import HOLDER
from terakoya_launch.jobs import find_job, find_plan_folder, poll_states
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import NO_OPTIONS, PlannedLaunch, plan_launch
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
    options: LaunchOptions = NO_OPTIONS,
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
    if not is_local(run) and not is_local(out) and as_written(run) != as_written(out):
        raise UserError(
            f"--out {as_written(out)}: expected a folder or {as_written(run)} itself; move the run to a folder first"
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
        if not is_local(out):
            folder.mkdir(parents=True, exist_ok=True)
            parameters = Path(shutil.copyfile(parameters, folder / PARAMETERS))
        return plan_launch(launcher, parameters, out, options, settings=settings)


@contextlib.contextmanager
def saying_where(place: Path, say: Say) -> Iterator[None]:
    """Says where the run stands if the block fails."""
    try:
        yield
    except (UserError, OSError):
        say(f"the run is stopped, and whole in {as_written(place)}; the same command goes on from there")
        raise


@contextlib.contextmanager
def _parameters_of(run: Path) -> Iterator[Path]:
    """Yields the parameter file of a run; of one at an address, a copy."""
    with open_views([run]) as (folder,):
        if not (folder / PARAMETERS).is_file():
            found = "none there" if not is_local(run) else describe_found(run, "run")
            raise UserError(f"{as_written(run)}: expected a run with its {PARAMETERS}, got {found}")
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
    folder = place_of(run).work_folder(None)
    if (lock := files.read_lock(folder)).held:
        _stop_process(run, folder, lock.holder, say)
    elif not is_local(run):
        with open_views([run]) as (view,):
            if (lock := files.read_lock(view)).held:
                _stop_process(run, view, lock.holder, say)


def _stop_process(run: Path, folder: Path, holder: str, say: Say) -> None:
    match = HOLDER.fullmatch(holder)
    if match is None or match[2] != socket.gethostname():
        how = f"`ssh {match[2]} kill {match[1]}` makes it save and end" if match else "make it save and end"
        raise UserError(
            f"{as_written(run)}: trains in {holder or 'another process'}, which this machine cannot stop: {how}; then "
            "give the same command again, with --lost where that machine is gone"
        )
    say(f"sent a stop request to process {match[1]}: it saves and ends")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(match[1]), signal.SIGTERM)
    if folder != place_of(run).work_folder(None):  # a copy of what is there, whose lock nobody else holds
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
    has_run = _has_run(out)
    if has_run and _first_record(run) != _first_record(out):
        raise UserError(
            f"--out {as_written(out)}: expected a new place, or one to which {as_written(run)} was carried before, got "
            "another run; choose another --out"
        )
    if is_local(out) and not (has_run and _listed_step(out) >= _listed_step(run)):
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
            f"--out {as_written(out)}: job {record.job} was submitted for it before, and is there still "
            f"({state.status}); `terakoya launch {record.launcher} status {as_written(out)}` shows it; give --lost "
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
    if there > step or (there == step > 0 and is_local(out)):  # an address may have a part of that step's files
        say(f"{as_written(out)}: has step {there:,} already")
        return
    if not is_local(out):
        keep = files.read_parameters(run).get("checkpoint", {}).get("keep", 1)
        place_of(out).copy_in(run, keep=keep)
    elif not is_local(run):
        with new_folder(out) as draft:
            place_of(run).copy_out(draft, say)
    else:
        with new_folder(out) as draft:
            copy_folder(run, draft)
            for name in MACHINE_FILES:
                (draft / name).unlink(missing_ok=True)
            if _newest_step(draft) != step:
                raise UserError(f"{out}: another content arrived than was copied; check the disk and try again")
    say(f"{as_written(out)}: has all of the run; {as_written(run)} stays as it is, and can be removed once that trains")


def _is_same(run: Path, out: Path) -> bool:
    return as_written(run) == as_written(out) or (is_local(out) and out.absolute() == run.absolute())


def _first_record(run: Path) -> bytes:
    """Returns the first line of the run's log, which tells it from other runs, as a log is only appended to; empty
    where there is none."""
    try:
        with open_views([run]) as (folder,), (folder / metrics.FILE).open("rb") as stream:
            return stream.read(RECORD_BYTES).partition(b"\n")[0]
    except FileNotFoundError:
        return b""


def _listed_step(run: Path) -> int:
    """Returns the step of the newest checkpoint in the folder or at the address, by its name; 0 if it has none."""
    with open_views([run] if _has_run(run) else []) as folders:
        return max((each.step for folder in folders for each in files.find_checkpoints(folder)), default=0)


def _has_run(run: Path) -> bool:
    return kind_of(run) == "run" if is_local(run) else place_of(run).has_run()


def _newest_step(run: Path) -> int:
    """Returns the step of the newest whole checkpoint in the folder, or of the newest one at the address; 0 if it has
    none."""
    if not is_local(run):
        return _listed_step(run)
    if kind_of(run) != "run":
        return 0
    newest, _ = find_newest_whole(run / "checkpoints")
    return 0 if newest is None else int(newest.name.rpartition("-")[2])

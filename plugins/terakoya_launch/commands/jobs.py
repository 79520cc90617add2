"""`terakoya launch LAUNCHER status|stop|logs|fetch JOB`: manages a submitted job."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from terakoya.commands.guidance import next_command
from terakoya.errors import UserError
from terakoya.log import console

if TYPE_CHECKING:
    from terakoya.components import JobState, SubmittedJob

VERBS = ("status", "stop", "logs", "fetch")


def run_verb(launcher: str, verb: str, arguments: Sequence[str], *, out: Path | None, every: float | None) -> None:
    """Runs `verb` on the one job in `arguments`; with `every`, repeats it every so many seconds until the job ends.

    Raises:
        UserError: no job or an unknown one, or `out` or `every` with a verb that does not take it.
        typer.Exit: with 1, if `status` finds that the job has failed.
    """
    from terakoya.folder_kinds import kind_of
    from terakoya_launch.jobs import fetch, find_job

    where = f"launch {launcher} {verb}"
    if len(arguments) != 1:
        raise UserError(f"{where}: expected a job or a run's folder, got {' '.join(arguments) or 'none'}")
    if (verb == "fetch") != (out is not None):
        raise UserError(f"{where}: {'expected --out FOLDER' if out is None else 'takes no --out'}")
    if every is not None and verb in ("stop", "fetch"):
        raise UserError(f"{where}: takes no --watch")
    job, record = find_job(launcher, arguments[0])
    try:
        if verb == "stop":
            console().print(job.stop(), markup=False, soft_wrap=True)
            next_command.show("launch", launcher, "status", arguments[0])
        elif verb == "fetch":
            assert out is not None
            console().print(fetch(job, out), markup=False, soft_wrap=True)
            if kind_of(out) == "run":
                next_command.after_run(out)
        elif verb == "logs":
            _print_output(job, every)
            next_command.show("launch", launcher, "status", arguments[0])
        else:
            run = Path(record.run) if record.run else None
            state = _print_states(job, record.job, run, every)
            _show_next(launcher, arguments[0], state, run)
            if state.failed:
                raise typer.Exit(1)
    except KeyboardInterrupt:
        stop = f"terakoya launch {launcher} stop {shlex.quote(arguments[0])}"
        console().print(f"job {record.job} still runs; `{stop}` stops it", markup=False, soft_wrap=True)


def _show_next(launcher: str, job: str, state: JobState, run: Path | None) -> None:
    """Names what follows from the state of a job, given as `job`, and of its run, if that is visible here."""
    from terakoya.folder_kinds import kind_of
    from terakoya.places import is_local
    from terakoya.plugins import registry

    if state.failed:
        next_command.show("launch", launcher, "logs", job)
    elif not state.done:
        next_command.show("launch", launcher, "status", job, "--watch")
    elif run is not None and not is_local(run):
        next_command.show("status", run)
    elif run is not None and kind_of(run) == "run":
        next_command.after_run(run)
    elif registry().component("launchers", launcher).fetches:
        next_command.show("launch", launcher, "fetch", job, "--out", run.name if run is not None else "run")
    else:
        next_command.show("launch", launcher, "logs", job)


def _states(job: SubmittedJob, every: float | None) -> Iterable[JobState]:
    from terakoya_launch.jobs import poll_states

    return [job.state()] if every is None else poll_states(job, every=every)


def _print_output(job: SubmittedJob, every: float | None) -> None:
    from rich.text import Text

    for _ in _states(job, every):
        for line in job.output():
            console().print(Text(line), soft_wrap=True)


def _print_states(job: SubmittedJob, name: str, run: Path | None, every: float | None) -> JobState:
    """Prints every change of the job's state and, if the run is visible here, of its progress; returns the last
    state."""
    from terakoya.commands import status

    last_state: JobState | None = None
    last_progress: tuple[str, int] | None = None
    state = None
    for state in _states(job, every):
        if state != last_state:
            last_state = state
            numbers = "  ".join(f"{key} {value:.6g}" for key, value in state.values.items())
            line = "  ".join(filter(None, (f"job {name}: {state.status}", state.detail, numbers)))
            console().print(line, markup=False, soft_wrap=True)
        with contextlib.suppress(UserError):  # not a run yet, or on a file system that this machine does not see
            run_state = status.read_all([run])[0] if run is not None else None
            if run_state is not None and (run_state.state, run_state.step) != last_progress:
                last_progress = (run_state.state, run_state.step)
                console().print(status.render([run_state]))
    assert state is not None
    return state

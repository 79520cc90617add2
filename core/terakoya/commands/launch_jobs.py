"""`terakoya launch LAUNCHER status|stop|logs|fetch JOB`: what became of a job that was submitted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import JobState, SubmittedJob

VERBS = ("status", "stop", "logs", "fetch")


def ask(launcher: str, verb: str, arguments: Sequence[str], *, out: Path | None, every: float | None) -> None:
    """Does `verb` with the one job of `arguments`; with `every`, again after so many seconds until the job is over.

    Raises:
        UserError: no job or one that is not known, `out` or `every` where they do not belong.
        typer.Exit: with 1, when `status` says that the job has failed.
    """
    from terakoya.launch.jobs import find_job
    from terakoya.log import console

    where = f"launch {launcher} {verb}"
    if len(arguments) != 1:
        raise UserError(f"{where}: expected a job or a run's folder, got {' '.join(arguments) or 'none'}")
    if (verb == "fetch") != (out is not None):
        raise UserError(f"{where}: {'expected --out FOLDER' if out is None else 'takes no --out'}")
    if every is not None and verb in ("stop", "fetch"):
        raise UserError(f"{where}: takes no --watch")
    job, note = find_job(launcher, arguments[0])
    try:
        if verb == "stop":
            console().print(job.stop(), markup=False, soft_wrap=True)
        elif verb == "fetch":
            assert out is not None
            console().print(job.fetch(out), markup=False, soft_wrap=True)
        elif verb == "logs":
            _print_output(job, every)
        else:
            _print_states(job, note.job, Path(note.run) if note.run else None, every)
    except KeyboardInterrupt:
        console().print(f"job {note.job} goes on; `terakoya launch {launcher} stop {arguments[0]}` ends it")


def _states(job: SubmittedJob, every: float | None) -> Iterable[JobState]:
    from terakoya.launch.jobs import poll_states

    return [job.state()] if every is None else poll_states(job, every=every)


def _print_output(job: SubmittedJob, every: float | None) -> None:
    from terakoya.log import console

    for _ in _states(job, every):
        for line in job.output():
            console().print(line, markup=False, soft_wrap=True)


def _print_states(job: SubmittedJob, name: str, run: Path | None, every: float | None) -> None:
    """Prints what changes: the job's state where it is, and how far the run is as far as its folder is seen here."""
    from terakoya.commands import status
    from terakoya.log import console
    from terakoya.runs import status as run_status

    shown: JobState | None = None
    step: tuple[str, int] | None = None
    state = None
    for state in _states(job, every):
        if state != shown:
            shown = state
            numbers = "  ".join(f"{key} {value:.6g}" for key, value in state.values.items())
            line = "  ".join(filter(None, (f"job {name}: {state.word}", state.told, numbers)))
            console().print(line, markup=False, soft_wrap=True)
        with contextlib.suppress(UserError):  # not a run yet, or on a file system that is not seen here
            now = run_status.read(run) if run is not None else None
            if now is not None and (now.state, now.step) != step:
                step = (now.state, now.step)
                console().print(status.render([now]))
    if state is not None and state.failed:
        raise typer.Exit(1)

"""Submitted jobs, which outlive the command that submitted them: find one by its plan's folder and poll its state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from terakoya.atomic_files import new_folder
from terakoya.components import JobState, Launcher, SubmittedJob
from terakoya.errors import UserError
from terakoya.places import is_local, place_of
from terakoya.plugins import registry
from terakoya_launch.submitted import SubmittedJobRecord


def find_plan_folder(run: Path) -> Path:
    """Returns the default folder for the plan of `run`: beside its folder, or for another place beside the work
    folder that it has by default."""
    folder = place_of(run).work_folder(None)
    return folder.with_name(f"{folder.name}.launch")


def find_job(launcher: str, name: str) -> tuple[SubmittedJob, SubmittedJobRecord]:
    """Returns the submitted job `name`: a job's identifier, the run's folder or place, or the
    folder of its plan.

    Raises:
        UserError: the launcher is unknown, or nothing was submitted from that folder, or by another launcher.
    """
    component: type[Launcher] = registry().component("launchers", launcher)
    for folder in (Path(name), find_plan_folder(Path(name))):
        record = SubmittedJobRecord.read(folder)
        if record is not None and record.launcher != launcher:
            raise UserError(f"launch {launcher}: {name} was submitted with: terakoya launch {record.launcher}")
        if record is not None:
            return component.find_job(record.job, folder.absolute()), record
    planned = find_plan_folder(Path(name))
    if not is_local(name) or Path(name).exists() or planned.exists():
        raise UserError(f"launch {launcher}: {name}: nothing was submitted from {planned}")
    return component.find_job(name), SubmittedJobRecord(launcher, name, "")


def poll_states(job: SubmittedJob, *, every: float) -> Iterator[JobState]:
    """Yields the state of `job` every `every` seconds, until and including its final state.

    Once the first poll has succeeded, a scheduler or service that does not answer yields the state "no answer".

    Raises:
        UserError: the first poll failed.
    """
    state = job.state()
    yield state
    while not state.done:
        time.sleep(every)
        try:
            state = job.state()
        except UserError as error:
            state = JobState("no answer", str(error))
        yield state


def fetch(job: SubmittedJob, out: Path) -> str:
    """Copies the results of `job` into the new folder `out`, whole and flushed to disk or not at all; returns a
    sentence that describes them.

    Raises:
        UserError: `out` exists and is not empty, or the job has no results that can be copied.
    """
    with new_folder(out) as draft:
        said = job.fetch(draft)
    return f"{out}: {said}"

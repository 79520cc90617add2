"""Jobs that go on by themselves: which one a plan's folder was submitted as, and following it to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from terakoya.components import JobState, Launcher, SubmittedJob
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.launchers.submitted import SubmittedJobRecord, plan_folder


def find_job(launcher: str, named: str) -> tuple[SubmittedJob, SubmittedJobRecord]:
    """The job that `named` means: what its place calls it, the run's folder, or the folder of its plan.

    Raises:
        UserError: no such launcher, or nothing was submitted for that folder, or by another launcher.
    """
    kind: type[Launcher] = registry().component("launchers", launcher)
    folder = Path(named)
    note = SubmittedJobRecord.read(folder) or SubmittedJobRecord.read(plan_folder(folder))
    if note is None:
        if folder.exists() or plan_folder(folder).exists():
            raise UserError(f"launch {launcher}: {named}: nothing was submitted from {plan_folder(folder)}")
        note = SubmittedJobRecord(launcher, named, "")
    elif note.launcher != launcher:
        raise UserError(f"launch {launcher}: {named} was submitted with: terakoya launch {note.launcher}")
    return kind.submitted(note.job), note


def poll_states(job: SubmittedJob, *, every: float) -> Iterator[JobState]:
    """The states of `job`, one each `every` seconds, the last being the one that it ended in.

    A place that does not answer for a while is waited for, once it has answered.

    Raises:
        UserError: it does not answer when it is asked first.
    """
    state = job.state()
    yield state
    while not state.over:
        time.sleep(every)
        try:
            state = job.state()
        except UserError as error:
            state = JobState("no answer", str(error))
        yield state

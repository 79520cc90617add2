"""Jobs that go on by themselves: which one a plan's folder was submitted as, and following it to its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from terakoya.components import JobState, Launcher, SubmittedJob
from terakoya.errors import UserError
from terakoya.plugins import registry

FILE = "submitted.json"
"""Of a plan's folder: the last job that was made of it."""


@dataclass(frozen=True)
class Note:
    """A job that was submitted: by which launcher, what its place calls it, the run's folder as it is called here."""

    launcher: str
    job: str
    run: str

    def leave(self, folder: Path) -> None:
        """Writes it into the plan's folder."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The one in `folder`, None where nothing was submitted from it."""
        file = folder / FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def plan_folder(run: Path) -> Path:
    """Where a plan for `run` is written unless somebody says otherwise."""
    return run.with_name(f"{run.name}.launch")


def find(launcher: str, named: str) -> tuple[SubmittedJob, Note]:
    """The job that `named` means: what its place calls it, the run's folder, or the folder of its plan.

    Raises:
        UserError: no such launcher, or nothing was submitted for that folder, or by another launcher.
    """
    kind: type[Launcher] = registry().component("launchers", launcher)
    folder = Path(named)
    note = Note.read(folder) or Note.read(plan_folder(folder))
    if note is None:
        if folder.exists() or plan_folder(folder).exists():
            raise UserError(f"launch {launcher}: {named}: nothing was submitted from {plan_folder(folder)}")
        note = Note(launcher, named, "")
    elif note.launcher != launcher:
        raise UserError(f"launch {launcher}: {named} was submitted with: terakoya launch {note.launcher}")
    return kind.submitted(note.job), note


def states(job: SubmittedJob, *, every: float) -> Iterator[JobState]:
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

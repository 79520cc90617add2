"""Ways to start a run, and the jobs that they leave behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import ClassVar, Literal, Protocol

from terakoya.components.base import Component
from terakoya.errors import UserError


@dataclass(frozen=True)
class Job:
    """A training run that is to be started by a launcher.

    Attributes:
        name: what it is called where it runs: letters, digits and hyphens.
        arguments: those of `terakoya`: `train`, the parameter file, `--out`, the run's folder. Paths are absolute.
        folder: where the command starts, so that relative paths in the parameters mean what they mean here.
        run: the run's folder, which all nodes see.
        batch_size: the parameters' table of rows: one entry for each node, by its rank or its host's name.
        timeout_seconds: after which a process gives up others that are silent.
        on_lost_node: what becomes of it when a node is lost: it stops, or the others go on with the same global batch.
        reads: the folders of data that it reads, so that a launcher can see whether they are there.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path
    run: Path
    batch_size: Mapping[str, int]
    timeout_seconds: int = 600
    on_lost_node: Literal["stop", "redistribute"] = "stop"
    reads: tuple[Path, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """What would start a job, to be read before anything is started.

    Attributes:
        files: name -> content, to be written into the plan's folder.
        commands: lines for a shell, in their order, which start the job from anywhere.
        notes: what else one should know, a sentence each.
    """

    files: Mapping[str, str]
    commands: Sequence[str]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class JobState:
    """What a place says of a job that it was given.

    Attributes:
        word: the state in the place's own word: PENDING, InProgress.
        told: what else there is to know: why it waits, where it runs, why it failed.
        over: whether nothing more comes of it; a job that is queued again is not over.
        failed: whether it is over and did not end well.
        values: numbers that the place itself has read in what the job printed, by name.
    """

    word: str
    told: str = ""
    over: bool = False
    failed: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


class SubmittedJob(Protocol):
    """A job that goes on without the command that submitted it. Every method may raise UserError: there is no such job,
    or its place does not answer."""

    def state(self) -> JobState:
        """How it is now."""

    def stop(self) -> str:
        """Asks it to save and leave; returns a sentence that says what was asked for."""

    def output(self) -> Iterator[str]:
        """The lines it has printed since this was called last."""

    def fetch(self, out: Path) -> str:
        """Brings what it made into the new folder `out`; returns a sentence that says what that is."""


class Launcher(Component):
    """A way to start a run: settings of the place, from which a job's files and commands follow."""

    jobs_go_on: ClassVar[bool] = False
    """Whether a job outlives the command that submits it: `submitted` then finds it again."""

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """What would start `job`, were the plan's files in `folder`, an absolute path. Starts and writes nothing.

        Raises:
            UserError: the job does not fit the settings.
        """
        raise NotImplementedError

    def check(self, job: Job, folder: Path) -> None:
        """Looks at the place where `job` is to run, the plan's files lying in `folder`, and prints what it finds.
        Starts nothing: `launch --check` asks for it.

        Raises:
            UserError: the place is not as it should be; or, as it stands, there is nothing this could look at.
        """
        raise UserError(f"launch {type(self).__name__.lower()}: there is nothing to look at; leave out --check")

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Starts what was planned, its files lying in `folder`; returns the exit code, 0 if all is well.

        As it stands, runs the plan's commands, one after another until one fails, in this terminal. One whose jobs go
        on by themselves returns once it is submitted, and leaves a `submitted.SubmittedJobRecord` in `folder`.
        """
        return run_commands(plan.commands)

    @classmethod
    def submitted(cls, name: str) -> SubmittedJob:
        """The job that its place calls `name`.

        Raises:
            UserError: a launcher whose jobs end with the command that starts them.
        """
        raise UserError(
            f"launch {cls.__name__.lower()}: its runs live in the terminal that starts them: Ctrl-C stops one, and "
            "`terakoya status RUN` looks at it"
        )


def run_commands(commands: Sequence[str]) -> int:
    """Runs lines for a shell one after another, in this terminal, until one fails; returns its exit code, else 0.

    Ctrl-C and SIGTERM are left to what runs: it saves and ends, and says how.
    """
    for command in commands:
        process = subprocess.Popen(["bash", "-c", command])
        handlers = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # the terminal sends it there too
            signal.SIGTERM: signal.signal(signal.SIGTERM, partial(_pass_on, process)),
        }
        try:
            code = process.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if code:
            return code if code > 0 else 128 - code
    return 0


def _pass_on(process: subprocess.Popen[bytes], number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)

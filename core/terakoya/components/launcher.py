"""Ways to start a run, and the jobs that they submit.

See docs/design/launching.md.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from terakoya.components.base import Component
from terakoya.errors import UserError
from terakoya.process_pool import start_child


@dataclass(frozen=True)
class Job:
    """A training run for a launcher to start.

    Attributes:
        name: the job's name at its destination: letters, digits and hyphens.
        arguments: the arguments of `terakoya`: `train`, the parameter file, `--out`, the run's folder or place. Paths
            are absolute.
        folder: the working directory of the command; relative paths in the parameters are relative to it.
        run: the run's folder, which all nodes see; of a run that is kept elsewhere, the work folder on the nodes.
        batch_size: the parameters' table of rows: one entry for each node, by its rank or its host's name.
        timeout_seconds: how long a process waits for another that does not answer.
        on_lost_node: what happens when a node is lost: the job stops, or the other nodes continue with the same global
            batch.
        data_folders: the data folders that the run reads, so that a launcher can check that they exist, or mount them.
        module: the module that takes the arguments: `terakoya`, or the one that checks the nodes instead.
        kept_in: where the run is kept, such as s3://bucket/run; None where it stays in its folder.
    """

    name: str
    arguments: tuple[str, ...]
    folder: Path
    run: Path
    batch_size: Mapping[str, int]
    timeout_seconds: int = 600
    on_lost_node: Literal["stop", "redistribute"] = "stop"
    data_folders: tuple[Path, ...] = ()
    module: str = "terakoya"
    kept_in: str | None = None

    @property
    def out(self) -> str:
        """The run's place or folder: what names it in `terakoya status` and other commands."""
        return self.kept_in or str(self.run)

    @property
    def place(self) -> str:
        """Where the run trains on the nodes, in words."""
        return str(self.run) if self.kept_in is None else f"{self.run} (kept in {self.kept_in})"


@dataclass(frozen=True)
class LaunchPlan:
    """The files and commands that start a job, for the user to read before anything is started.

    Attributes:
        files: name -> content, to be written into the plan's folder.
        commands: shell command lines, in order, which start the job from any working directory.
        notes: further facts for the user, a sentence each.
    """

    files: Mapping[str, str]
    commands: Sequence[str]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class JobState:
    """The state of a submitted job, as the system that runs it (Slurm, SageMaker) reports it.

    Attributes:
        status: the state in the system's own word: PENDING, InProgress.
        detail: why the job waits, where it runs, why it failed.
        done: whether the job has ended for good; a job that is queued again is not done.
        failed: whether the job is done and did not succeed.
        values: numbers that the system itself extracted from the job's output, by name.
    """

    status: str
    detail: str = ""
    done: bool = False
    failed: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


class SubmittedJob(Protocol):
    """A job that continues after the command that submitted it has ended. Every method may raise UserError: there is no
    such job, or the system that runs it does not answer."""

    def state(self) -> JobState:
        """Returns the current state."""

    def stop(self) -> str:
        """Requests that the job save and stop; returns a sentence that describes the request."""

    def output(self) -> Iterator[str]:
        """Yields the lines that the job has printed since the last call."""

    def fetch(self, out: Path) -> str:
        """Writes the job's results into the empty folder `out`, which gets its own name only if nothing is raised;
        returns words that describe them."""


class Launcher(Component):
    """A way to start a run. Its settings describe the destination; a job's files and commands follow from them."""

    detached: ClassVar[bool] = False
    """Whether a job continues after the command that submits it has ended: `find_job` then finds it again."""

    main_setting: ClassVar[str | None] = None
    """The setting that VALUE of `terakoya move RUN LAUNCHER:VALUE` is, such as the partition."""
    fetches: ClassVar[bool] = False
    """Whether the results of a submitted job are where this machine does not see them, and `SubmittedJob.fetch` copies
    them."""
    places_run: ClassVar[bool] = False
    """Whether the settings say in which folder of the nodes a run trains, so that it is no choice of the user's."""

    def nodes(self) -> int | None:
        """Returns the number of nodes that the settings name; None where the settings leave it to the job."""
        return None

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """Returns the files and commands that start `job` when the files are in `folder`, an absolute path. Starts and
        writes nothing. Raises UserError if the job does not fit the settings."""
        raise NotImplementedError

    def check(self, job: Job, folder: Path) -> None:
        """Checks the destination of `job`, with the plan's files in `folder`, and prints what it finds. Starts nothing.
        `launch --check` calls this. Raises UserError if the destination is not ready; or, by default, as this launcher
        has no checks."""
        raise UserError(f"launch {type(self).__name__.lower()}: has no checks; leave out --check")

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Starts `plan`, whose files are in `folder`; returns the exit code, 0 for success.

        By default, runs the plan's commands, one after another until one fails, in this terminal. A launcher of
        detached jobs returns when the job is submitted, and writes a `submitted.SubmittedJobRecord` into `folder`.
        """
        return run_commands(plan.commands)

    @classmethod
    def find_job(cls, name: str, folder: Path | None = None) -> SubmittedJob:
        """Returns the job called `name` at its destination; `folder` has the files of its plan, and is None where the
        user named only the job. Raises UserError if the jobs of this launcher end with the command that starts them."""
        raise UserError(
            f"launch {cls.__name__.lower()}: its runs belong to the terminal that starts them: Ctrl-C stops one, and "
            "`terakoya status RUN` shows its state"
        )


def run_commands(commands: Sequence[str]) -> int:
    """Runs shell command lines one after another, in this terminal, until one fails; returns its exit code, else 0.

    The running command handles stop signals: it saves and ends, and reports how. It gets SIGTERM if this process dies.
    """
    for command in commands:
        process = start_child(["bash", "-c", command])
        handlers = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}  # the terminal sends it there too
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                handlers[number] = signal.signal(number, lambda *_, process=process: process.terminate())
        try:
            code = process.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if code:
            return code if code > 0 else 128 - code
    return 0

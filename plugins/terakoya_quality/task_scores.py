"""Fine-tunes saved checkpoints for tasks while the run goes on, so that one sees what its model is worth, not its loss
alone.

A checkpoint that is due is linked to RUN/task_scores, and `terakoya evaluate --tasks` scores it in a process of its
own: on the CPU, with one thread, at the lowest priority. The run itself only starts it, looks now and then whether it
has ended, and writes the scores down. Of checkpoints that become due meanwhile, the newest is scored next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

from terakoya.components import EventListener, EventPlugin
from terakoya.components.run import Run, StepReport
from terakoya.errors import UserError
from terakoya.process_pool import start_child
from terakoya.toolkit.checkpoint_copies import check_every, copy_checkpoint

FOLDER = "task_scores"
OF_THE_RUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "SLURM_")
"""How the names of environment variables begin that would make the other process a part of this run."""
LOOK_EVERY = 10
"""Steps between two looks at the other process."""


class TaskScores(EventPlugin):
    """Scores every `every`th step with `terakoya evaluate --tasks TASKS --data DATA`."""

    tasks: str
    """Suites, their tasks or suite files, as `evaluate --tasks` takes them: "jsts,jnli"."""
    data: str
    """The folder of the tasks' files."""
    every: PositiveInt
    """Steps between two scores: a multiple of `checkpoint.save_steps`. Unit: optimizer steps."""
    seeds: PositiveInt = 1
    """How many seeds are trained."""
    limit: PositiveInt | None = 1000
    """The largest number of examples of each file; null: all of them."""
    learning_rate: float | None = None
    """The learning rate of the tasks; null: the best of those that the suite names, which are tried one by one."""

    test_settings: ClassVar[Mapping[str, Any]] = {"tasks": "jsts", "data": "data", "every": 1000}

    def check(self, parameters: Any) -> None:
        check_every(self.every, parameters)

    def start(self, run: Run) -> EventListener:
        """Returns the listener. Raises UserError where the folder of the tasks' files is missing."""
        if not Path(self.data).is_dir():
            raise UserError(
                f"events.task_scores.data: {self.data}: expected the folder of the tasks' files, found none"
            )
        return _Listener(self)

    def command(self, checkpoint: Path, out: Path) -> list[str]:
        """Returns the command that scores `checkpoint` and writes its scores to `out`."""
        options = ["--tasks", self.tasks, "--data", self.data, "--seeds", str(self.seeds), "--out", str(out), "--json"]
        if self.limit is not None:
            options += ["--limit", str(self.limit)]
        if self.learning_rate is not None:
            options += ["--learning-rate", str(self.learning_rate)]
        return [sys.executable, "-m", "terakoya", "evaluate", str(checkpoint), *options]


class _Listener(EventListener):
    """Scores one checkpoint at a time.

    Attributes:
        process: what scores `scored`; None where nothing is being scored.
        scored: the copy of the checkpoint.
        waiting: the copy of the newest checkpoint that became due meanwhile.
    """

    def __init__(self, settings: TaskScores) -> None:
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.scored = Path()
        self.waiting: Path | None = None

    def run_started(self, run: Run) -> None:
        if run.rank == 0:
            for left in (run.folder / FOLDER).glob("step-*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        if run.rank != 0 or _step(folder) % self.settings.every:
            return
        copy = run.folder / FOLDER / folder.name
        try:
            copy.parent.mkdir(exist_ok=True)
            copy_checkpoint(folder, copy)
        except OSError as error:
            run.warn(f"events.task_scores: {folder.name} cannot be scored: {error.strerror}; the run continues")
            return
        if self.waiting is not None:
            run.print(f"events.task_scores: step {_step(self.scored):,} takes long; {self.waiting.name} is passed over")
            shutil.rmtree(self.waiting, ignore_errors=True)
        self.waiting = copy
        self._look(run)

    def step_finished(self, run: Run, report: StepReport) -> None:
        if run.step % LOOK_EVERY == 0:
            self._look(run)

    def run_finished(self, run: Run, error: BaseException | None) -> None:
        """Waits for the scores of the last checkpoint where the run has come to its end. Who stops it, or a time limit,
        does not wait."""
        at_end = run.ended_by is not None or run.length.is_reached(step=run.step, tokens=run.consumed_tokens)
        try:
            while error is None and at_end and self.process is not None:
                run.print(f"events.task_scores: waits for the scores of step {_step(self.scored):,}")
                self.process.wait()
                self._look(run)
        finally:  # a Ctrl-C ends the waiting, too
            if self.process is not None:
                self.process.kill()
                self.process.wait()
                if error is None:
                    run.print(f"events.task_scores: the run stops before step {_step(self.scored):,} has its scores")

    def _look(self, run: Run) -> None:
        if self.process is not None and self.process.poll() is not None:
            self._write(run, self.process.returncode)
            self.process = None
        if self.process is None and self.waiting is not None:
            self.scored, self.waiting = self.waiting, None
            self._start(run)

    def _start(self, run: Run) -> None:
        try:
            with self.scored.with_suffix(".log").open("wb") as log:
                self.process = start_child(  # it ends with this process, however that ends
                    self.settings.command(self.scored, self.scored.with_suffix(".json")),
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=dict(_environment()),
                    start_new_session=True,
                )  # fmt: skip
            _give_way(self.process.pid)
        except OSError as error:
            run.warn(f"events.task_scores: {self.scored.name} cannot be scored: {error.strerror}; the run continues")

    def _write(self, run: Run, status: int) -> None:
        result, log = self.scored.with_suffix(".json"), self.scored.with_suffix(".log")
        shutil.rmtree(self.scored, ignore_errors=True)
        step = _step(self.scored)
        scores = dict(_scores(json.loads(result.read_text(encoding="utf-8")))) if result.is_file() else {}
        if status != 0 or not scores:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = lines[-1] if lines else f"exit status {status}"
            run.warn(f"events.task_scores: step {step:,} has no scores: {said}")
            return
        log.unlink()
        run.write("task_scores", scored_step=step, scores=scores)
        shown = (f"{name} {'undefined' if score is None else f'{score:.4f}'}" for name, score in scores.items())
        run.print(f"scores of step {step:,}: " + "  ".join(shown))


def _step(checkpoint: Path) -> int:
    """The step of a checkpoint's folder, `step-00000100`."""
    return int(checkpoint.name.rpartition("-")[2])


def _scores(result: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yields "TASK SET SCORE" and the mean over seeds of each score in the JSON of `evaluate`, None where it is not
    defined."""
    for task, found in result.get("finetuned", {}).items():
        for of, scores in found["scores"].items():
            for name, score in scores.items():
                yield f"{task} {of} {name}", score["mean"]


def _give_way(process: int) -> None:
    """Gives `process`, which leads a session, the lowest priority. Linux may share its time among sessions first; then
    a priority of the process counts within its session alone, and the session has one, too."""
    os.setpriority(os.PRIO_PROCESS, process, 19)
    with contextlib.suppress(OSError):  # not on this system
        Path(f"/proc/{process}/autogroup").write_text("19")


def _environment() -> Iterator[tuple[str, str]]:
    """Yields the environment of a process that has nothing to do with this run or its GPUs."""
    for name, value in os.environ.items():
        if not name.startswith(OF_THE_RUN):
            yield name, value
    yield from {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}.items()

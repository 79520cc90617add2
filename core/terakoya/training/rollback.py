"""Going back to a checkpoint from before a spike of the loss that lasts, and passing over the rows of its steps.

Nothing but the numbers of the steps decides it. Who starts again from any checkpoint before the spike comes to the same
decision after the same step, so there is no file that could be lost: a run that goes back removes the checkpoints after
the spike, and starts again from the newest one that is left. Later checkpoints record what was passed over.

See docs/design/spikes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from terakoya.errors import Diverged, RollingBack, TemporaryFailure
from terakoya.log import plural
from terakoya.runs.checkpoints import find_problems, list_checkpoints
from terakoya.runs.finding import PERMANENT
from terakoya.training.batches import BatchMaker
from terakoya.training.checkpoint.checkpoint import remove_checkpoint
from terakoya.training.run import Run


@dataclass(frozen=True)
class Rollback:
    """One decision to go back, and the steps [first, last], counted from 1, whose rows are passed over.

    They begin with the step before the one that went wrong, whose update may have caused it: the loss of a step is that
    of the weights before its update.

    Attributes:
        facts: further values of its records, as JSON.
        seen: what was seen, the beginning of a sentence; known when it is decided.
    """

    first: int
    last: int
    facts: Mapping[str, Any]
    seen: str = ""

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any]) -> tuple[Self, ...]:
        """Returns the rollbacks that the checkpoint with this `manifest` is the result of, oldest first."""
        return tuple(cls(each["first"], each["last"], each) for each in manifest.get("rollbacks", ()))

    def to_json(self) -> dict[str, Any]:
        """Returns an entry of a manifest's `rollbacks`."""
        return {**self.facts, "first": self.first, "last": self.last}


class DecidedRollback(RollingBack):
    """The decision to go back; raised on all ranks alike, before the same step.

    Attributes:
        rollback: why.
        rollbacks: all of the run, this one included; known once the checkpoints after the spike are gone.
    """

    def __init__(self, rollback: Rollback) -> None:
        self.rollback = rollback
        self.rollbacks: tuple[Rollback, ...] = ()
        super().__init__(f"{rollback.seen}: the run goes back")


class SkippedSteps:
    """The optimizer steps that a run does not take, on all ranks alike: those of `data.skip_steps`, and those that
    `rollbacks` pass over: how the run went back so far, oldest first. Their rows count as trained on."""

    def __init__(self, run: Run, batches: BatchMaker) -> None:
        self._run = run
        self._batches = batches
        self._run_log = run.run_log
        self.rollbacks: tuple[Rollback, ...] = ()

    def contain(self, step: int) -> bool:
        """Whether the optimizer step `step`, counted from 0, is not taken."""
        passed_over = any(each.first <= step + 1 <= each.last for each in self.rollbacks)
        return passed_over or self._run.parameters.data.skips(step)

    def pass_over_next(self) -> None:
        """Counts the run's next step and its rows as taken, without training on them."""
        run = self._run
        reason = "data.skip_steps says" if run.parameters.data.skips(run.step) else "they belong to a spike"
        _, run.consumed_rows = self._batches.plan.rows(run.step)
        run.step += 1
        if not self.contain(run.step):
            self._run_log.write("skip", step=run.step)
            self._run_log.print(f"skipped the rows of the steps up to {run.step:,}, as {reason}")

    def require_another_rollback(self, rollback: Rollback) -> None:
        """Raises Diverged if the run may not go back once more because of `rollback`."""
        settings = self._run.parameters.spikes
        assert settings is not None
        if len(self.rollbacks) >= settings.max_rollbacks:
            raise Diverged(
                f"step {rollback.last:,}: {rollback.seen}; the run has gone back {len(self.rollbacks)} "
                f"time{plural(len(self.rollbacks))}, and spikes.max_rollbacks is {settings.max_rollbacks}. Lower "
                f"optimizer.learning_rate, or look at {self._batches.describe_rows(*self._rows_of(rollback))}"
            ) from None

    def log_rollback(self) -> None:
        """Reports the last of `rollbacks`, after which the run has started again."""
        rollback, rows = self.rollbacks[-1], self._rows_of(self.rollbacks[-1])
        text = (
            f"{rollback.seen}; the run went back to step {self._run.step:,} and passes over the steps "
            f"{rollback.first:,} to {rollback.last:,}, which took {self._batches.describe_rows(*rows)}"
        )
        self._run_log.write(
            "rollback", step=rollback.last, back_to=self._run.step, first_skipped=rollback.first, **rollback.facts,
            rows=rows, number=len(self.rollbacks), text=text,
        )  # fmt: skip
        self._run_log.print(f"warning: {text}")

    def _rows_of(self, rollback: Rollback) -> tuple[int, int]:
        """Returns the rows [start, stop) of the order that `rollback` passes over."""
        plan = self._batches.plan
        return plan.rows(rollback.first - 1)[0], plan.rows(rollback.last - 1)[1]


def remove_checkpoints_since(rollback: Rollback, run: Path) -> None:
    """Removes the checkpoints of `run` with updates of the steps that are passed over, the newest first.

    A process that is killed in between continues from one of those that are left, and decides the same.

    Raises:
        Diverged: no older checkpoint is whole; nothing was removed.
        UserError: checkpoints cannot be read or removed now.
    """
    found = list_checkpoints(run / "checkpoints")
    older = [folder for step, folder in found if step < rollback.first]
    if all(find_problems(folder) for folder in reversed(older)):
        raise Diverged(
            f"{rollback.seen}; the run cannot go back, as no checkpoint from before step {rollback.first:,} is "
            "whole: lower optimizer.learning_rate, or start again with spikes.action rollback from the first step on"
        )
    try:
        for step, folder in reversed([*found, *list_checkpoints(run / PERMANENT)]):
            if step >= rollback.first:
                remove_checkpoint(folder)
    except OSError as error:
        raise TemporaryFailure(f"{run}: a checkpoint cannot be removed now: {error}") from error

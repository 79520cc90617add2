"""What ranks exchange before each step: its counts, stop requests, errors and requests of plugins, whether a save has
finished, and the loss of the step before the last.

One all-reduce of a few integers carries all of it. It can begin ahead of the step; ranks wait for its result only when
they are about to take the step.

See docs/design/stopping.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from terakoya.training.batches import StepBatches
from terakoya.training.plugin_events import PluginEvents
from terakoya.training.run import Run
from terakoya.training.saving import Saver


@dataclass(frozen=True)
class StepVote:
    """This rank's vote on a step, whose all-reduce is under way.

    Attributes:
        batches: the micro-batches of this rank.
        stop_reason: why this rank wants to stop instead of taking the step; None where it does not.
        saving_step: the step of the last save that had begun when the vote was cast.
        wait_for_sums: waits for the votes of all ranks and returns their element-wise sum.
    """

    batches: StepBatches
    stop_reason: str | None
    saving_step: int
    wait_for_sums: Callable[[], list[int]]


@dataclass(frozen=True)
class StepDecision:
    """What the votes of all ranks amount to; the same on every rank.

    Attributes:
        counts: the global counts of the step.
        stop: whether any rank wants to stop instead of taking the step.
        save_finished: whether the background save has finished on all ranks.
        save: whether an event on any rank has requested a checkpoint.
        end: whether an event on any rank has requested the end of the run.
        losses: the sums over ranks of the votes' losses.
    """

    counts: Mapping[str, int]
    stop: bool
    save_finished: bool
    save: bool
    end: bool
    losses: Sequence[int]


class StepSync:
    """Lets all ranks of `run` decide alike whether to take the next step; `names` are those of the counts that are
    summed."""

    def __init__(self, run: Run, names: Sequence[str], saver: Saver, events: PluginEvents) -> None:
        self.context = run.context
        self.names = names
        self.saver = saver
        self.events = events

    def begin(self, batches: StepBatches, stop_reason: str | None, losses: Sequence[int] = ()) -> StepVote:
        """Sends this rank's vote on a step to the others and returns at once, without waiting for theirs. `losses` are
        this rank's part of the loss of each earlier step that is not known yet: as many on every rank."""
        counted = batches.real if self.context.is_replica_leader else []  # a replica's other ranks have the same rows
        local = [sum(batch.counts[name] for batch in counted) for name in self.names]
        flags = [int(stop_reason is not None), int(self.events.error is not None), int(self.saver.has_finished())]
        sums = self.context.begin_sum([*local, *flags, *self.events.requests(), *losses])
        return StepVote(batches, stop_reason, self.saver.step, sums)

    def wait(self, vote: StepVote) -> StepDecision:
        """Waits for the votes of all ranks and returns the decision. Raises UserError on all ranks if a plugin's event
        failed on any of them."""
        sums = vote.wait_for_sums()
        (stops, plugin_errors, finished, save, end), losses = sums[len(self.names) :][:5], sums[len(self.names) + 5 :]
        if plugin_errors:
            self.events.raise_error()
        # if another save has begun since the vote was cast, `finished` is about the save before it
        save_finished = finished == self.context.world_size and vote.saving_step == self.saver.step
        counts = dict(zip(self.names, sums, strict=False))
        return StepDecision(counts, bool(stops), save_finished, bool(save), bool(end), losses)

"""What ranks tell each other before a step: how much it counts, who wants to stop, what failed, whose save has ended.

One reduction of a few whole numbers carries all of it. It can be begun ahead of the step, and waited for only when the
step is to be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from terakoya.plugins import PluginError
from terakoya.training.batches import StepBatches
from terakoya.training.distributed.context import Connection
from terakoya.training.loss import total_counts
from terakoya.training.saving import Saver


@dataclass(frozen=True)
class Proposal:
    """A step that ranks are about to agree on.

    Attributes:
        batches: this rank's.
        wish: why this rank wants to stop instead, if it does.
        saving: the step of the last save that had begun when this was asked.
        sums: waits for the sums over ranks of what each has told.
    """

    batches: StepBatches
    wish: str | None
    saving: int
    sums: Callable[[], list[int]]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step, the same everywhere.

    Attributes:
        counts: its global counts.
        stop: whether any of them wants to stop instead of taking it.
        saved: whether the save behind the steps has ended on all of them.
    """

    counts: Mapping[str, int]
    stop: bool
    saved: bool


class Agreement:
    """How the ranks of `connection` come to take the same step.

    Attributes:
        names: what is counted.
        error: what a plugin raised here in an event, until the others know.
    """

    def __init__(self, connection: Connection, names: Sequence[str], saver: Saver) -> None:
        self.connection = connection
        self.names = names
        self.saver = saver
        self.error: PluginError | None = None

    def propose(self, batches: StepBatches, wish: str | None) -> Proposal:
        """Tells the others of this rank's part of a step, without waiting for theirs; `wish` says why it would rather
        stop."""
        counted = batches.real if self.connection.leads else []  # others of a replica have the same rows
        local = total_counts(counted, self.names)
        flags = [int(wish is not None), int(self.error is not None), int(self.saver.ended())]
        return Proposal(batches, wish, self.saver.step, self.connection.begin_sum(local + flags))

    def agree(self, proposal: Proposal) -> Agreed:
        """What has come of the proposed step.

        Raises:
            UserError: on all ranks, if an event failed on any.
        """
        *summed, wishes, failures, ended = proposal.sums()
        if failures:
            self.carry()
        # a save that began since this was asked is another one
        saved = ended == self.connection.world_size and proposal.saving == self.saver.step
        return Agreed(dict(zip(self.names, summed, strict=True)), bool(wishes), saved)

    def carry(self) -> None:
        """Raises what an event plugin raised on any rank on all of them, if one did; collective."""
        self.connection.together("an event plugin", self.error)

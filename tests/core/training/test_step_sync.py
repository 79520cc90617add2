"""What ranks exchange before a step."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from terakoya.components import Batch
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import UserError
from terakoya.plugins import PluginError
from terakoya.training.batches import StepBatches
from terakoya.training.plugin_events import PluginEvents
from terakoya.training.step_sync import StepSync


@dataclass
class Saving:
    """The part of a `Saver` that a `StepSync` uses."""

    step: int = -1
    finished: bool = False

    def has_finished(self) -> bool:
        return self.finished


def batch(**counts: int) -> Batch:
    return Batch({"input_ids": np.zeros((1, 1), dtype=np.int64)}, counts)


def step_sync(saving: Saving, *, rank: int = 0, replica_size: int = 1) -> StepSync:
    processes = tuple(ProcessInfo(number, 0, number, "here") for number in range(replica_size))
    context = DistributedContext(rank, replica_size, torch.device("cpu"), Topology(processes, replica_size), None, None)
    parameters = SimpleNamespace(events={})
    run: Any = SimpleNamespace(context=context, parameters=parameters, save_requested=False, end_requested=None)
    saver: Any = saving
    return StepSync(run, ["masked", "tokens"], saver, PluginEvents(run, compiled=False))


def test_counts_of_all_micro_batches_are_added_up_and_a_dummy_counts_nothing() -> None:
    sync = step_sync(Saving())
    step = StepBatches([batch(tokens=5, masked=1), batch(tokens=7, masked=2)], batch(tokens=100, masked=100))
    decision = sync.wait(sync.begin(step, None))
    assert decision.counts == {"tokens": 12, "masked": 3}
    assert not decision.stop and not decision.save_finished


@pytest.mark.parametrize(("rank", "tokens"), [(0, 5), (1, 0)])
def test_the_rows_of_a_replica_are_counted_once(rank: int, tokens: int) -> None:
    sync = step_sync(Saving(), rank=rank, replica_size=2)
    decision = sync.wait(sync.begin(StepBatches([batch(tokens=5, masked=1)], None), None))
    assert decision.counts["tokens"] == tokens, (
        "the count of this process alone: no process group connects it with the other"
    )


def test_a_stop_request_of_one_rank_stops_all() -> None:
    sync = step_sync(Saving())
    assert sync.wait(sync.begin(StepBatches([], None), "SIGTERM")).stop


def test_a_plugins_error_is_raised_at_the_next_vote_that_carries_it() -> None:
    sync = step_sync(Saving())
    before = sync.begin(StepBatches([], None), None)
    sync.events.error = PluginError("mine", "it broke")
    assert not sync.wait(before).stop, "all ranks take this step: the vote was cast before the error"
    with pytest.raises(UserError, match="rank 0 on here: plugin mine: it broke"):
        sync.wait(sync.begin(StepBatches([], None), None))


def test_a_save_that_began_after_the_vote_is_not_taken_for_the_one_that_finished() -> None:
    saving = Saving(step=10)
    sync = step_sync(saving)
    assert not sync.wait(sync.begin(StepBatches([], None), None)).save_finished, "the save is still running"
    saving.finished = True
    assert sync.wait(sync.begin(StepBatches([], None), None)).save_finished
    vote = sync.begin(StepBatches([], None), None)
    saving.step = 20
    assert not sync.wait(vote).save_finished

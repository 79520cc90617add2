"""What ranks tell each other before a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from terakoya.components import Batch
from terakoya.errors import UserError
from terakoya.plugins import PluginError
from terakoya.training.batches import StepBatches
from terakoya.training.distributed.context import Connection
from terakoya.training.distributed.topology import Place, Topology
from terakoya.training.step_sync import Agreement


@dataclass
class Saving:
    """What an agreement asks a `Saver`."""

    step: int = -1
    through: bool = False

    def ended(self) -> bool:
        return self.through


def batch(**counts: int) -> Batch:
    return Batch({"input_ids": np.zeros((1, 1), dtype=np.int64)}, counts)


def agreement(saving: Saving, *, rank: int = 0, replica_size: int = 1) -> Agreement:
    places = tuple(Place(number, 0, number, "here") for number in range(replica_size))
    connection = Connection(rank, replica_size, torch.device("cpu"), Topology(places, replica_size), None, None)
    saver: Any = saving
    return Agreement(connection, ["masked", "tokens"], saver)


def test_counts_of_all_micro_batches_are_added_up_and_a_dummy_counts_nothing() -> None:
    asked = agreement(Saving())
    step = StepBatches([batch(tokens=5, masked=1), batch(tokens=7, masked=2)], batch(tokens=100, masked=100))
    agreed = asked.agree(asked.propose(step, None))
    assert agreed.counts == {"tokens": 12, "masked": 3}
    assert not agreed.stop and not agreed.saved


@pytest.mark.parametrize(("rank", "tokens"), [(0, 5), (1, 0)])
def test_the_rows_of_a_replica_are_counted_once(rank: int, tokens: int) -> None:
    asked = agreement(Saving(), rank=rank, replica_size=2)
    agreed = asked.agree(asked.propose(StepBatches([batch(tokens=5, masked=1)], None), None))
    assert agreed.counts["tokens"] == tokens, "of this process alone: nothing connects it with the other"


def test_a_wish_to_stop_is_heard() -> None:
    asked = agreement(Saving())
    assert asked.agree(asked.propose(StepBatches([], None), "SIGTERM")).stop


def test_what_a_plugin_raised_is_raised_with_the_next_step_that_hears_of_it() -> None:
    asked = agreement(Saving())
    before = asked.propose(StepBatches([], None), None)
    asked.error = PluginError("mine", "it broke")
    assert not asked.agree(before).stop, "all take this step, as none could know"
    with pytest.raises(UserError, match="rank 0 on here: PluginError: plugin mine: it broke"):
        asked.agree(asked.propose(StepBatches([], None), None))


def test_a_save_that_began_after_the_question_is_not_taken_for_the_one_that_ended() -> None:
    saving = Saving(step=10)
    asked = agreement(saving)
    assert not asked.agree(asked.propose(StepBatches([], None), None)).saved, "it goes on"
    saving.through = True
    assert asked.agree(asked.propose(StepBatches([], None), None)).saved
    proposal = asked.propose(StepBatches([], None), None)
    saving.step = 20
    assert not asked.agree(proposal).saved

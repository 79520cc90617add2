"""Several processes whose activations wait on the host train with the same bits as without."""

from __future__ import annotations

from pathlib import Path

import engine_work
import pytest
from engine_runs import Case, Runs, assert_same_bits, needs_deepspeed
from selection import at_night
from worlds import Job

from terakoya.distributed.context import DistributedContext
from terakoya_memory import host_activations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = {
    "fsdp": Case("odd", {"engine": "fsdp"}),
    "fsdp, recomputed": Case("llama", {"engine": "fsdp"}, own={"activation_checkpointing": "full"}),
    "tp": Case("llama", {"tp_size": 2}),
    "sp": Case("llama", {"sp_size": 2}),
    **{f"zero {stage}": Case("bert", {"engine": "deepspeed", "zero_stage": stage}) for stage in (2, 3)},
}


def move_everything(job: Job, context: DistributedContext) -> None:
    """Trains with small activations on the host, too; rank 0 counts those that come back."""
    host_activations.MIN_BYTES = 64
    bring, moved = host_activations._Waiting.bring_back, []
    host_activations._Waiting.bring_back = lambda waiting: moved.append(1) or bring(waiting)  # type: ignore[method-assign]
    try:
        engine_work.train(job, context)
    finally:
        host_activations._Waiting.bring_back = bring  # type: ignore[method-assign]
    engine_work.write(job, context, "moved", len(moved))


@pytest.mark.parametrize("name", at_night(CASES, always=("fsdp",)))
@needs_deepspeed
def test_no_bit_changes(runs: Runs, name: str) -> None:
    mine: Path = runs.of(CASES[name], work=move_everything, activation_offloading=True, evaluation=None)
    plain = runs.of(CASES[name])
    assert int((mine / "moved.json").read_text()) > 10
    assert_same_bits(plain, mine)

"""What DeepSpeed is told of a process, without DeepSpeed."""

from __future__ import annotations

import os

import pytest
import torch

from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya_parallel.deepspeed_setup import find_local_rank, local_rank_variable


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", 0),  # each of srun's tasks sees its own GPU alone
        ("cuda:3", 3),
        ("cpu", 3),
    ],
)
def test_the_local_rank_is_the_number_of_the_gpu(device: str, expected: int) -> None:
    """DeepSpeed makes it torch's device, and there may be one alone."""
    topology = Topology(tuple(ProcessInfo(rank, 0, rank, "here") for rank in range(4)))
    assert find_local_rank(DistributedContext(3, 4, torch.device(device), topology, control=None)) == expected


@pytest.mark.parametrize("launcher", ["3", None])
def test_a_launchers_variable_gives_way_while_deepspeed_reads_it(
    launcher: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", launcher)
    with local_rank_variable(0):
        assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ.get("LOCAL_RANK") == launcher

"""How a process leaves the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology


def leave(device: str, processes: int, error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Leaves a context of so many processes with `error`; returns whether the process group was destroyed."""
    destroyed: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    topology = Topology(tuple(ProcessInfo(rank, 0, rank, "here") for rank in range(processes)))
    context = DistributedContext(0, processes, torch.device(device), topology, control=None)
    if error is None:
        with context:
            pass
    else:
        with pytest.raises(type(error)), context:
            raise error
    return bool(destroyed)


def test_after_an_error_on_a_gpu_no_rank_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """To destroy its group NCCL waits for all that was begun in it, and for all ranks of a host."""
    error = RuntimeError("CUDA out of memory")
    assert not leave("cuda:0", 2, error, monkeypatch)
    assert error.leaves_at_once  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device", "processes", "fails"), [("cuda:0", 2, False), ("cuda:0", 1, True), ("cpu", 2, True), ("cpu", 2, False)]
)
def test_otherwise_the_group_is_destroyed(
    device: str, processes: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("no room") if fails else None
    assert leave(device, processes, error, monkeypatch)
    assert not hasattr(error, "leaves_at_once")

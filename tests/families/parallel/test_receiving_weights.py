"""How processes of GPUs receive the weights of rank 0, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from terakoya_parallel.initial_weights import InitialWeights
from terakoya_parallel.tensor_part import TensorPart


def test_on_gpus_no_rank_runs_ahead_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog would end a rank that had begun all broadcasts when rank 0 has not computed the last weight in
    time, however soon it sends each."""
    done: list[str] = []
    event = SimpleNamespace(record=lambda: done.append("record"), synchronize=lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: done.append("broadcast"))
    module, context = nn.Linear(2, 3), SimpleNamespace(device=torch.device("cpu"), is_main=False)
    deferred: Any = None
    initial = InitialWeights(module, deferred, context)  # type: ignore[arg-type]
    parts = {name: TensorPart.whole(value.shape) for name, value in module.named_parameters()}
    initial.fill(module, {name: name for name in parts}, parts)
    assert done == ["broadcast", "record", "wait"] * 2

"""What an engine does around CUDA graphs: their results lie in memory that the next micro-step writes over."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.topology import ProcessInfo, Topology
from terakoya.training.engines.ddp import DDPEngine

ONE_PROCESS = DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, ""),)), None, None)
BATCHES = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]), torch.tensor([[0.5, 4.0]])]


class _Static(torch.autograd.Function):
    """The identity, whose result and gradient are each in the same memory at every call, as those of a graph are."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, result: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        result.copy_(value)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradient.copy_(gradients[0])
        return ctx.gradient, None, None


class Recorded(nn.Module):
    """A weight whose gradient, and a sum which, are in memory of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))
        self.memory = [torch.zeros(2), torch.zeros(2), torch.zeros(()), torch.zeros(())]

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = _Static.apply(self.weight, self.memory[0], self.memory[1])
        return {"loss": _Static.apply((batch["rows"] @ weight).square().sum(), self.memory[2], self.memory[3])}


def build(micro_steps: int, *, cuda_graphs: bool = True) -> DDPEngine:
    module = Recorded()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return DDPEngine(
        ONE_PROCESS, module, optimizer, precision="fp32", max_grad_norm=0.0, micro_steps=micro_steps,
        cuda_graphs=cuda_graphs,
    )  # fmt: skip


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each time that graphs were allowed to write over earlier results."""
    seen: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: seen.append("mark"))
    return seen


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_sums_and_gradients_are_right_although_graphs_write_over_their_results(
    micro_steps: int, marks: list[str]
) -> None:
    engine = build(micro_steps)
    weight = engine.module.weight
    assert isinstance(weight, nn.Parameter)
    outside = weight.grad  # where gradients of several micro-steps are summed, from the first one on
    assert (outside is None) == (micro_steps == 1)
    addresses = set() if outside is None else {outside.data_ptr()}
    for _ in range(2):
        before = weight.detach().clone()
        marks.clear()
        sums = [
            engine.micro_step({"rows": rows}, lambda sums: sums["loss"], last=number == micro_steps - 1)["loss"]
            for number, rows in enumerate(BATCHES[:micro_steps])
        ]
        assert marks == ["mark"] * micro_steps
        expected = [(rows @ before).square().sum() for rows in BATCHES[:micro_steps]]
        assert torch.equal(torch.stack(sums), torch.stack(expected))
        gradient = sum((2 * (rows @ before) * rows[0] for rows in BATCHES[:micro_steps]), torch.zeros(2))
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient)
        addresses.add(weight.grad.data_ptr())
        engine.step(0.01)
        # one micro-step's gradient goes, since its memory is the graph's; that of several stays outside, and empty
        assert weight.grad is None if micro_steps == 1 else not weight.grad.any()
    assert micro_steps == 1 or (len(addresses) == 1 and engine.module.memory[1].data_ptr() not in addresses)


def test_validation_begins_graphs_anew_and_keeps_its_sums(marks: list[str]) -> None:
    engine = build(1)
    sums = [engine.evaluate({"rows": rows})["loss"] for rows in BATCHES]
    assert marks == ["mark"] * 3 and len({float(each) for each in sums}) == 3


def test_without_graphs_the_compiler_is_not_told(marks: list[str]) -> None:
    engine = build(3, cuda_graphs=False)
    engine.micro_step({"rows": BATCHES[0]}, lambda sums: sums["loss"], last=True)
    engine.evaluate({"rows": BATCHES[0]})
    engine.step(0.01)
    assert not marks and engine.module.weight.grad is None

"""What an engine does around CUDA graphs: their results lie in memory that the next micro-step writes over."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch import Tensor, nn

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.training.engines.ddp import DDPEngine, StepOptions
from terakoya.training.model import compilation
from terakoya.training.setup import train_in_this_process
from terakoya.training.start import warm_up

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
    return DDPEngine(ONE_PROCESS, module, optimizer, StepOptions(micro_steps=micro_steps, cuda_graphs=cuda_graphs))


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


def trained(
    store: Path, validation: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *, choice: compilation.Choice,
    fails: Callable[[], None] = lambda: None, **changes: Any,
) -> tuple[dict[str, Tensor], list[str]]:  # fmt: skip
    """The weights of a run on the CPU that is told to compile `choice`, and what its compiler was asked for. As a
    recording `fails`, the compiler of what is to be recorded calls that."""
    asked = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
        asked.append("graphs" if options else "kernels")
        if options:
            fails()
        return graph.forward

    monkeypatch.setattr(compilation, "BACKEND", compiler)
    monkeypatch.setattr(compilation, "GRAPH_OPTIONS", {"recorded": True})
    monkeypatch.setattr(compilation, "choose", lambda *_, **__: choice)
    monkeypatch.setattr(compilation, "missing_tools", lambda device: None)
    torch._dynamo.reset()
    settings = toy.parameters(store, validation, max_steps=3, **changes)
    train_in_this_process(Parameters.from_dict(settings, source="test"), out)
    return toy.saved(sorted((out / "checkpoints").iterdir())[-1]), asked


def printed(captured: pytest.CaptureFixture[str]) -> str:
    return " ".join(captured.readouterr().err.split())


LENGTHS = {"phases": [{"share": 0.5, "data": {"sequence_length": 16}}, {"share": 0.5}]}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as in test_compile
@pytest.mark.parametrize("changes", [{"micro_batch_size": 4}, LENGTHS], ids=["several", "phases"])
def test_a_try_before_the_first_step_changes_no_number(
    changes: dict[str, Any], store: Path, validation_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The weights are those of a run without a try; each length of rows is compiled, for training and validation."""
    found = {
        graphs: trained(
            store, validation_store, tmp_path / str(graphs), monkeypatch,
            choice=compilation.Choice("whole", cuda_graphs=graphs), **changes,
        )
        for graphs in (False, True)
    }  # fmt: skip
    assert "with CUDA graphs" in printed(capsys)
    (plain, kernels), (recorded, graphs) = found[False], found[True]
    assert plain.keys() == recorded.keys() and all(torch.equal(plain[name], recorded[name]) for name in plain)
    assert set(kernels) == {"kernels"} and set(graphs) == {"graphs"} and len(graphs) == len(kernels)


def cannot_record() -> None:
    raise RuntimeError("cudagraph failed: an operation copies from the host")


def runs_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (cannot_record, "an operation copies from the host"),
        pytest.param(runs_out_of_memory, "out of memory", marks=pytest.mark.nightly),
        pytest.param(None, "t allocate memory", marks=pytest.mark.nightly),
    ],
    ids=["recording", "memory", "update"],
)
def test_a_run_that_cannot_be_recorded_trains_with_compiled_blocks(
    fails: Callable[[], None] | None, why: str, store: Path, validation_store: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    blocks, _ = trained(
        store, validation_store, tmp_path / "blocks", monkeypatch, choice=compilation.Choice("blocks"),
        micro_batch_size=4,
    )  # fmt: skip
    capsys.readouterr()
    if fails is None:  # the micro-steps find room, and the update beside them does not
        monkeypatch.setattr(warm_up, "UPDATE_BYTES", 1 << 40)
    left, asked = trained(
        store, validation_store, tmp_path / "left", monkeypatch, fails=fails or (lambda: None),
        choice=compilation.Choice("whole", cuda_graphs=True), micro_batch_size=4,
    )  # fmt: skip
    said = printed(capsys)
    assert said.count("CUDA graphs") == said.count("CUDA graphs off: ") == 1 and why in said, said
    assert "compile blocks" in said and asked[-1] == "kernels"
    assert all(torch.equal(blocks[name], left[name]) for name in blocks), "no bit of the try is left"

"""Compiled blocks and modules: as many graphs as shapes of a step, the same numbers, names and exports."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compiled_runs
import numpy as np
import pytest
import torch
import torch._inductor.config as compiler
import toy
from torch import nn
from torch._dynamo.utils import counters

from terakoya.components import ModuleBuild
from terakoya.components.progress import Length
from terakoya.components.rows import Layout
from terakoya.config.parameters import Parameters
from terakoya.distributed.topology import ProcessInfo, RankBatch, Topology
from terakoya.errors import UserError
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit import gpu_compiler
from terakoya.toolkit.architectures import attention
from terakoya.training.batches import BatchMaker, collate_rows, to_device
from terakoya.training.model import compilation
from terakoya.training.model.build import build_module_for_training
from terakoya.training.model.compilation import Choice
from terakoya.training.run_plan import plan_without_phases
from terakoya.training.setup import train_in_this_process
from terakoya.training.trainer import Trainer
from terakoya_contract import toy as toy_model
from terakoya_memory.activation_checkpointing import checkpoint_block

PROBE = Path(toy.__file__).with_name("compile_probe.py")
CPU = torch.device("cpu")
RECORDED = Choice("whole", cuda_graphs=True)
# torch's tracer looks at the gradients of activations, and silences the warning in another way than pytest
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compilation, "BACKEND", compilation.TRACE_ONLY)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs there are after each step."""
    seen: list[int] = []
    take_step = Trainer._step

    def step(trainer: Trainer, *arguments: Any) -> Any:
        report = take_step(trainer, *arguments)
        seen.append(counters["stats"].get("unique_graphs", 0))
        return report

    monkeypatch.setattr(Trainer, "_step", step)
    return seen


def train(out: Path, store: Path, validation: Path, **changes: Any) -> None:
    settings = toy.parameters(store, validation, max_steps=None, epochs=1.28, **changes)
    train_in_this_process(Parameters.from_dict(settings, source="toy"), out)


def last(out: Path) -> Path:
    return sorted((out / "checkpoints").iterdir())[-1]


@pytest.mark.slow
def test_a_run_makes_its_graphs_in_its_first_step_and_computes_the_same(
    store: Path, validation_store: Path, tmp_path: Path, graphs: list[int]
) -> None:
    for mode in ("off", "blocks"):
        graphs.clear()
        train(tmp_path / mode, store, validation_store, compile=mode)
    # micro-batches of 5 rows and of 1, and validation
    assert set(graphs) == {3}
    assert not counters["graph_break"]
    off, blocks = (toy.saved(last(tmp_path / mode)) for mode in ("off", "blocks"))
    assert off.keys() == blocks.keys() and all(torch.equal(off[name], blocks[name]) for name in off)
    files = [
        {file.name: file.read_bytes() for file in (last(tmp_path / m) / "model").iterdir()} for m in ("off", "blocks")
    ]
    assert files[0] == files[1]

    shutil.rmtree(last(tmp_path / "blocks"))
    train(tmp_path / "blocks", store, validation_store, compile="blocks")
    resumed = toy.saved(last(tmp_path / "blocks"))
    assert all(torch.equal(blocks[name], resumed[name]) for name in blocks)
    shutil.rmtree(last(tmp_path / "blocks"))
    train(tmp_path / "blocks", store, validation_store, compile="off")
    assert "compile was blocks, and is off" in (tmp_path / "blocks/metrics.jsonl").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_compile_too(store: Path, tmp_path: Path, engine: str, precision: str) -> None:
    architecture = toy.without_dropout(toy.parameters(store)["architecture"])

    def losses(mode: str) -> dict[int, tuple[float, float]]:
        settings = toy.parameters(
            store, max_steps=3, architecture=architecture, compile=mode, activation_checkpointing="selective",
            parallel={"engine": engine}, precision=precision,
        )  # fmt: skip
        toy.train(
            settings, tmp_path / mode, nodes=(2,), plugins=[PROBE],
            environment={"COMPILE_PROBE": str(tmp_path / f"{mode}-graphs")},
        )  # fmt: skip
        return toy.losses(tmp_path / mode)

    assert losses("blocks") == losses("off")
    for rank in (0, 1):
        counts = (tmp_path / f"blocks-graphs-{rank}").read_text().split()
        assert len(counts) == 3 and len(set(counts)) == 1 and counts[0] != "0"


# ---------------------------------------------------------------------------------------------- small pieces


@pytest.mark.slow
def test_blank_rows_change_no_count_and_no_sum(tmp_path: Path) -> None:
    for name in ("bert", "electra", "llama", "t5"):
        parameters = compiled_runs.parameters(name, tmp_path / name, without_dropout=True)
        store = TokenStore.open(tmp_path / name / "store" / "store")
        source = RowSource(store, parameters.objective.row_layout(), sequence_length=32, seed=11)
        module = build_module_for_training(parameters, toy_model.VOCABULARY).train()
        attention.use(module, attention.MASKED)
        short, full = (
            collate_rows(parameters.objective, toy_model.VOCABULARY, source.load(0, np.arange(2)), size, source)
            for size in (2, 5)
        )
        assert short.counts == full.counts
        assert len(full.arrays["input_ids"]) == 5
        with torch.no_grad():
            one, other = (module(to_device(each, CPU, flash=False)) for each in (short, full))
        for term, value in one.items():
            torch.testing.assert_close(value, other[term])


@pytest.mark.slow
def test_micro_batches_of_a_compiled_run_have_the_shapes_of_a_full_one(store: Path) -> None:
    """In a full step and in the last, which holds fewer rows; the row of a micro-step without rows, too."""
    settings = toy.parameters(store)
    parameters = Parameters.from_dict(
        {**settings, "architecture": toy.without_dropout(settings["architecture"])}, source="toy"
    )
    opened = TokenStore.open(store)
    source = RowSource(opened, parameters.objective.row_layout(), sequence_length=32, seed=3, store_id=0)
    vocabulary, rows = opened.facts.vocabulary, len(source)
    assert rows % 16 % 6, "the last micro-batch is not full"
    length = Length(steps=-(-rows // 16), tokens=0, rows=rows)
    plan = plan_without_phases(parameters, Loader([source], [1.0]), RankBatch(0, 12, 6, 3, 16), length)
    plain, compiled = (BatchMaker(plan, vocabulary, compiled=each) for each in (False, True))
    module = build_module_for_training(parameters, vocabulary).train()
    attention.use(module, attention.MASKED)
    sizes, shapes = set(), set()
    for step in (0, rows // 16):
        one, other = plain(step), compiled(step)
        assert len(one.real) == len(other.real) and one.dummy is not None and other.dummy is not None
        for short, full in zip([*one.real, one.dummy], [*other.real, other.dummy], strict=True):
            sizes.add(len(short.arrays["input_ids"]))
            shapes.add(tuple((name, array.shape, array.dtype) for name, array in full.arrays.items()))
            assert short.counts == full.counts
            with torch.no_grad():
                sums, expected = (module(to_device(each, CPU, flash=False)) for each in (full, short))
            for term, value in expected.items():
                torch.testing.assert_close(sums[term], value)
    assert {1, 6} < sizes, "full, short and empty micro-batches"
    assert len(shapes) == 1 and next(iter(shapes))[0][1][0] == 6


class Recomputed(nn.Module):
    """A block that changes in place what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.up(states)
        return states + self.down(inner.mul_(2.0).relu_())


@pytest.mark.nightly
def test_selective_recomputation_is_right_where_a_block_changes_results_in_place() -> None:
    torch.manual_seed(0)
    block, states = Recomputed(), torch.randn(4, 8)

    def gradient() -> torch.Tensor:
        block.zero_grad()
        block(states).square().sum().backward()
        assert block.up.weight.grad is not None
        return block.up.weight.grad.clone()

    expected = gradient()
    checkpoint_block(block, "selective")
    block.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(gradient(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_is_frozen_like_all_below_it_is_compiled_without_recomputation(kind: str) -> None:
    """No backward computes it again, and torch compiles no dropout that a graph without a backward would."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).requires_grad_(False).train()
    checkpoint_block(block, kind)  # type: ignore[arg-type]
    block.compile(backend="aot_eager", fullgraph=True)
    assert not block(torch.ones(4, 8)).requires_grad


def test_what_cannot_be_traced_is_named() -> None:
    class Asks(nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states if states.sum().item() > 0 else -states

    block = Asks()
    block.compile(backend=compilation.TRACE_ONLY, fullgraph=True)
    words = r'compile: .*File .*test_compile.py.*Set "compile": "off"'
    with pytest.raises(UserError, match=words), compilation.explain_compile_errors():
        block(torch.ones(2))


def test_the_innermost_line_of_a_model_is_named() -> None:
    lines = ["Unsupported call", "from user code:"]
    lines += [f'  File "{place}.py", line 3, in forward' for place in ("/a/model", "/a/layer", "/lib/torch/nn/linear")]
    assert compilation.describe(RuntimeError("\n".join(lines))) == (
        'Unsupported call, File "/a/layer.py", line 3, in forward'
    )
    assert compilation.describe(RuntimeError("no place")) == "no place"


def test_what_the_compiler_of_graphs_cannot_do_is_said() -> None:
    raised = "backend='inductor' raised:\nRuntimeError: no such kernel\n\nSet TORCHDYNAMO_VERBOSE=1 for more"
    assert compilation.describe(RuntimeError(raised)) == "backend='inductor' raised: RuntimeError: no such kernel"


def test_plugins_run_the_model_with_any_shape() -> None:
    block = nn.Linear(4, 4)
    block.compile(backend=compilation.TRACE_ONLY, fullgraph=True, dynamic=False)
    with compilation.run_uncompiled(True):
        for rows in range(1, 20):  # more than the limit of graphs
            block(torch.ones(rows, 4))
    assert not counters["stats"]


# --------------------------------------------------------------------------------------------------- settings


def parse(**changes: Any) -> Parameters:
    return Parameters.from_dict(toy.parameters(Path("none"), **changes), source="toy.json")


@pytest.mark.parametrize(
    ("parallel", "mode", "words"),
    [
        ({"engine": "deepspeed", "zero_stage": 1}, "blocks", 'code of its own around layers; use "off"'),
        (
            {"tp_size": 2}, "blocks",
            'there is none with attention_probs_dropout_prob 0.0, and parallel.sequence_parallel seeds it outside of '
            'graphs.; use "off"',
        ),
        ({"engine": "fsdp"}, "whole", 'block by block; use "blocks"'),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_compile_says_so(parallel: dict[str, Any], mode: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(parallel=parallel, compile=mode)
    assert compilation.choose(parse(parallel=parallel), CPU) == Choice("off")


def test_auto_compiles_and_records_on_a_gpu_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compilation.choose(parse(), gpu) == Choice("off", note="compile off: the package triton is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "C compiler" in str(compilation.choose(parse(), gpu).note)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert compilation.choose(parse(), gpu) == RECORDED
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu_compiler.MIN_CAPABILITY)
    assert compilation.choose(parse(), gpu) == RECORDED
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P40")
    assert compilation.choose(parse(), gpu) == Choice(
        "off", note="compile off: Tesla P40 is older than compute capability 7.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert compilation.choose(parse(precision="fp8"), gpu) == RECORDED
    assert compilation.choose(parse(compile="off"), gpu) == Choice("off")
    monkeypatch.setattr(type(parse().architecture), "compile_obstacle", "it counts tokens")
    assert "it counts tokens" in str(compilation.choose(parse(), gpu).note)
    with pytest.raises(UserError, match="it counts tokens"):
        parse(compile="blocks")


@pytest.mark.parametrize(
    ("changes", "processes", "mode", "why"),
    [
        ({}, 2, "blocks", 'not been seen in several processes, where "cuda_graphs": true takes them'),
        ({"compile": "blocks"}, 1, "blocks", 'what is compiled whole, which compile "blocks" excludes'),
        ({"activation_checkpointing": "full"}, 1, "blocks", "activation_checkpointing saves memory, which they keep"),
        ({"parallel": {"engine": "fsdp"}}, 1, "blocks", 'parallel.engine "fsdp" gathers weights inside the forward'),
        ({"objective": {"type": "masked_lm", "layout": "lines"}}, 1, "blocks", "as wide as the longest of their batch"),
        ({"objective": {"type": "contrastive"}}, 1, "blocks", "embeds all examples in a forward without a backward"),
        ({"parallel": {"engine": "deepspeed", "zero_stage": 1}}, 1, "off", "compile off: DeepSpeed runs code of its"),
        ({"compile": "off"}, 1, "off", None),
        ({"cuda_graphs": False}, 1, "blocks", None),
        ({"compile": "whole", "cuda_graphs": False}, 1, "whole", None),
    ],
)
def test_a_run_that_is_not_recorded_says_why_in_one_line(
    changes: dict[str, Any], processes: int, mode: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "missing_tools", lambda device: None)
    choice = compilation.choose(parse(**changes), torch.device("cuda", 0), processes=processes)
    assert (choice.mode, choice.cuda_graphs) == (mode, False)
    assert choice.note is None if why is None else choice.note is not None and why in choice.note, choice.note
    assert compilation.choose(parse(**changes), CPU, processes=processes).note is None


def test_graphs_need_a_gpu_and_all_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, gpu = parse(cuda_graphs=True), torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"cuda_graphs: needs a GPU and a .*, and this run is on the cpu; use \"cuda_g"):
        compilation.choose(wanted, CPU)
    monkeypatch.setattr(compilation, "missing_tools", lambda device: "the package triton is not installed")
    with pytest.raises(UserError, match=r"cuda_graphs: needs a GPU and a .*, and the package triton is not installed"):
        compilation.choose(wanted, gpu)
    monkeypatch.setattr(compilation, "missing_tools", lambda device: None)
    assert compilation.choose(wanted, gpu) == RECORDED


def test_the_compiler_is_asked_for_graphs_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    parameters = compiled_runs.parameters("electra", tmp_path)
    module = build_module_for_training(parameters, toy_model.VOCABULARY)
    for graphs in (True, False):
        compilation.compile_parts([module], Layout("packed"), cuda_graphs=graphs)
    assert [each.get("options") for each in asked] == [compilation.GRAPH_OPTIONS, None]
    assert compilation.GRAPH_OPTIONS["triton.cudagraphs"] and compilation.GRAPH_OPTIONS["triton.cudagraph_or_error"]
    assert compilation.GRAPH_OPTIONS.keys() <= set(torch._inductor.list_options()), "the compiler has these"


@pytest.mark.parametrize(("processes", "own", "most"), [(1, None, 32), (4, None, 2), (16, None, 1), (4, "7", 32)])
def test_processes_of_a_node_share_its_cores_as_they_compile(
    processes: int, own: str | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "available_cores", lambda: 8)
    monkeypatch.delenv(compilation.THREADS, raising=False)
    if own is not None:  # the compiler has read it
        monkeypatch.setenv(compilation.THREADS, own)
    topology = Topology(tuple(ProcessInfo(rank, 0, rank, "") for rank in range(processes)))
    build = ModuleBuild(parse(), toy_model.VOCABULARY, SimpleNamespace(rank=0, topology=topology), "whole")
    with compiler.patch(compile_threads=32):
        compilation.compile_module(nn.Linear(2, 2), build)
        assert compiler.compile_threads == most


@pytest.mark.nightly
def test_kernels_are_written_for_a_small_bert(
    store: Path, validation_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: list[int]
) -> None:
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    architecture = {**toy.parameters(store)["architecture"], "hidden_dropout_prob": 0.3}
    for name in ("whole", "resumed"):
        train(tmp_path / name, store, validation_store, compile="blocks", architecture=architecture)
        if name == "whole":
            assert len(set(graphs)) == 1
            shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
            shutil.rmtree(last(tmp_path / "resumed"))
    one, other = (toy.saved(last(tmp_path / name)) for name in ("whole", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)

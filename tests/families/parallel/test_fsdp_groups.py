"""Which weights `fully_shard` gathers when, over which processes and in which precision; who saves which rows.

Each rank is built in this process, one after another, in a world that exchanges nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from terakoya.checking.synthetic_rows import full_rows
from terakoya.components import ModuleBuild
from terakoya.config.parallel import Parallel
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.batches import to_device
from terakoya.training.engines import build as engines
from terakoya.training.engines.engine import SavedTensors
from terakoya.training.model import compilation
from terakoya.training.model.build import build_module_for_training
from terakoya.training.model.module_parts import saved_values
from terakoya_contract.toy import VOCABULARY, values
from terakoya_parallel.engine import ParallelEngine
from terakoya_parallel.fsdp_groups import float32_weights
from terakoya_parallel.mesh import ProcessMesh
from terakoya_precision import bf16_functions

CPU = torch.device("cpu")
OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "bert": {"type": "masked_lm"},
    "llama": {"type": "causal_lm", "append_eos": False},
    "t5": {"type": "span_corruption"},
}
LAYERS = 2


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[DistributedContext]:
    """A world in which a gather returns this rank's values for every rank, and a sum its own."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        topology = Topology(tuple(ProcessInfo(each, 0, each, "here") for each in range(world)))
        yield DistributedContext(rank, world, CPU, topology, None, None)
    finally:
        dist.destroy_process_group()


def parameters_of(name: str, *, shard: int | None = None, **changes: Any) -> Parameters:
    component = registry().component("architectures", name)
    raw = {
        "architecture": {"type": name, **values(component)}, "objective": dict(OBJECTIVES[name]),
        "data": {"train": ["store"], "sequence_length": 32}, "batch_size": {"-1": 8}, "max_steps": 1,
        "precision": "fp32", "optimizer": {"type": "adamw", "learning_rate": 0.1}, "schedule": {"type": "constant"},
        "parallel": {"engine": "fsdp", "dp_shard_size": shard}, **changes,
    }  # fmt: skip
    return Parameters.from_dict(raw, source="test")


def build(context: DistributedContext, parameters: Parameters, *, compiled: bool = False) -> ParallelEngine:
    """The engine over weights that are the same for every rank."""
    torch.manual_seed(1)
    module = build_module_for_training(parameters, VOCABULARY)
    run = ModuleBuild(parameters, VOCABULARY, context, "blocks" if compiled else "off")
    return cast(ParallelEngine, engines.build(module, run, micro_steps=2, micro_batch_size=2))


class Events(TorchDispatchMode):
    """What happens in order, each with its dtype and elements: "gather", "reduce" (within a group of processes), "sum"
    (over groups), and "product"."""

    NAMES: Mapping[str, str] = {
        "c10d::_allgather_base_": "gather", "c10d::_reduce_scatter_base_": "reduce", "c10d::allreduce_": "sum",
        "aten::mm": "product", "aten::addmm": "product",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.NAMES.get(func.name().removesuffix(".out"))
        if name is not None:
            value = args[0][0] if isinstance(args[0], list) else args[0]  # what a gather fills, what a reduce leaves
            self.seen.append((name, value.dtype, value.numel()))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[tuple[torch.dtype, int]]:
        return [(dtype, size) for kind, dtype, size in self.seen if kind == name]


def micro_step(engine: ParallelEngine, parameters: Parameters, *, last: bool = True) -> None:
    """Takes one micro-step."""
    rows = full_rows(parameters.objective.row_layout(), VOCABULARY, rows=2, sequence_length=32)
    batch = to_device(parameters.objective.collate(rows, VOCABULARY), CPU, flash=False)
    engine.micro_step(batch, lambda sums: cast(Tensor, sum(value for value in sums.values())), last=last)


def take(engine: ParallelEngine, parameters: Parameters, *, last: bool = True) -> Events:
    """What one micro-step of `engine` does."""
    with Events() as events:
        micro_step(engine, parameters, last=last)
    return events


def block_parts(name: str, *, stream: bool = False) -> tuple[list[int], int]:
    """Elements that each block gathers in 16 bits, and the number of all others, of an unsharded model."""
    parameters = parameters_of(name)
    module: Any = build_module_for_training(parameters, VOCABULARY)
    low = []
    for block in parameters.architecture.blocks(module.model):
        kept = set() if stream else {id(value) for value in float32_weights(block)}
        low.append(sum(value.numel() for value in block.parameters() if id(value) not in kept))
    return low, sum(value.numel() for value in module.parameters()) - sum(low)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_blocks_are_gathered_in_16_bits_and_reduced_in_32(precision: str) -> None:
    parameters = parameters_of("llama", precision=precision, autocast=True)
    low, rest = block_parts("llama")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with rank_of(0, 2) as context:
        engine = build(context, parameters)
        take(engine, parameters)  # the first one initialises
        seen = take(engine, parameters)
        norms = [value for name, value in engine.module.named_parameters() if "norm" in name]
    assert len(norms) == 2 * LAYERS + 1 and {value.dtype for value in norms} == {torch.float32}
    assert Counter(seen.of("gather")) == {(torch.float32, rest): 1, (dtype, low[0]): 2 * LAYERS}
    assert {dtype for dtype, _ in seen.of("reduce")} == {torch.float32}
    assert sum(size for _, size in seen.of("reduce")) == (sum(low) + rest) / 2


def test_in_the_stream_all_is_gathered_in_16_bits_and_reduced_in_32() -> None:
    """No weight is converted and no gradient rounded in between."""
    parameters = parameters_of("llama", precision="bf16")
    low, rest = block_parts("llama", stream=True)
    with rank_of(0, 2) as context:
        engine = build(context, parameters)
        take(engine, parameters)
        seen = take(engine, parameters)
        assert engine.copies[0].facts["bf16_stream"] and not engine.copies[0].copies
        assert {value.dtype for _, value in engine.model_state()} == {torch.float32}
        assert {each.grad.dtype for each in engine.trainable if each.grad is not None} == {torch.float32}
    assert Counter(seen.of("gather")) == {(torch.bfloat16, rest): 1, (torch.bfloat16, low[0]): 2 * LAYERS}
    assert {dtype for dtype, _ in seen.of("reduce")} == {torch.float32}
    assert sum(size for _, size in seen.of("reduce")) == (sum(low) + rest) / 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler asks each input of a block for it
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled_blocks_round_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bf16 weight a compiled block would return one in bf16. A GPU's products return float32 sums."""

    def float_product(left: Tensor, right: Tensor) -> Tensor:
        return (left.float()[:, :, None] * right.float()).sum(1)

    monkeypatch.setattr(bf16_functions, "float_product", float_product)
    parameters, found = parameters_of(name, precision="bf16"), []
    for compiled in (False, True):
        counters.clear()
        with rank_of(0, 2) as context:
            engine = build(context, parameters, compiled=compiled)
            blocks = compilation.blocks(engine.module, [parameters.architecture], VOCABULARY) if compiled else ()
            compilation.compile_parts(blocks, parameters.objective.row_layout(), backend="aot_eager")
            torch.manual_seed(2)
            micro_step(engine, parameters)
            found.append({key: value.grad for key, value in engine.trained.items() if value.grad is not None})
    assert counters["stats"]["unique_graphs"] == 1
    for key, value in found[0].items():
        assert "key.bias" in key or (found[1][key] - value).norm() <= 0.01 * value.norm(), key
        assert value.ndim == 1 or not torch.equal(found[1][key], found[1][key].bfloat16().float()), key


def test_in_float32_whole_blocks_are_gathered() -> None:
    parameters = parameters_of("llama")
    module: Any = build_module_for_training(parameters, VOCABULARY)
    block, *_ = parameters.architecture.blocks(module.model)
    whole, of_block = (sum(value.numel() for value in each.parameters()) for each in (module, block))
    with rank_of(0, 2) as context:
        seen = take(build(context, parameters), parameters)
    assert Counter(seen.of("gather")) == {
        (torch.float32, whole - LAYERS * of_block): 1, (torch.float32, of_block): 2 * LAYERS
    }  # fmt: skip


def test_what_autocast_leaves_in_float32_is_not_gathered_in_16_bits() -> None:
    """An embedding within a block would add up its gradients in 16 bits."""
    module: Any = build_module_for_training(parameters_of("t5"), VOCABULARY)
    block = module.model.encoder.block[0]
    names = {id(value): name for name, value in block.named_parameters()}
    kept = {names[id(value)] for value in float32_weights(block)}
    assert kept == {
        "layer.0.SelfAttention.relative_attention_bias.weight", "layer.0.layer_norm.weight", "layer.1.layer_norm.weight"
    }  # fmt: skip
    linear = nn.Linear(3, 3)
    assert not float32_weights(nn.Sequential(linear)), "a bias is cast with its matrix"


def test_a_block_is_gathered_before_the_products_of_the_one_before_it() -> None:
    """Else the host would launch a block's kernels first, and the next gather would begin behind them."""
    parameters = parameters_of("llama", precision="bf16")
    with rank_of(0, 2) as context:
        engine = build(context, parameters)
        take(engine, parameters)
        kinds = [kind for kind, _, _ in take(engine, parameters).seen]
    first_product = kinds.index("product")
    assert kinds[:first_product].count("gather") == 1 + 2, "the root, the first block and the second"
    after = kinds[first_product:]
    backward = after[: after.index("reduce")]
    assert backward.count("gather") == LAYERS, "the last block, and the one below it before the last is reduced"


def test_groups_gather_among_themselves_and_add_up_once_a_step() -> None:
    low, rest = block_parts("llama", stream=True)
    parameters = parameters_of("llama", shard=2, precision="bf16")
    with rank_of(3, 4) as context:
        engine = build(context, parameters)
        take(engine, parameters)
        engine.clear_gradients()
        before, at_last = take(engine, parameters, last=False), take(engine, parameters)
    assert (engine.processes.size("dp_replicate"), engine.processes.index("dp_replicate")) == (2, 1)
    for seen in (before, at_last):
        assert Counter(seen.of("gather"))[torch.bfloat16, low[0]] == 2 * LAYERS
        assert sum(size for _, size in seen.of("reduce")) == (sum(low) + rest) / 2
    assert not before.of("sum")
    assert {dtype for dtype, _ in at_last.of("sum")} == {torch.float32}
    assert sum(size for _, size in at_last.of("sum")) == (sum(low) + rest) / 2, "a process's own part, once"
    gradient = engine.trainable[0].grad
    assert gradient is not None and gradient.shape == engine.trainable[0].shape


class Whole:
    """The values of an unsharded module as a checkpoint has them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, name: str) -> Tensor:
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def box(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        return self.tensors[name][tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shard"), [(4, None), (4, 2), (6, 3), (6, 2)])
def test_all_ranks_together_save_every_element_once_and_read_it_back(world: int, shard: int | None) -> None:
    parameters = parameters_of("bert", shard=shard)
    torch.manual_seed(1)
    module = build_module_for_training(parameters, VOCABULARY)
    expected = {name: value.detach().clone() for name, value in saved_values(module)}
    found = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    written = []
    for rank in range(world):
        with rank_of(rank, world) as context:
            engine = build(context, parameters)
            mine = 0
            for each in engine.shards_to_save("model"):
                assert isinstance(each.start, tuple)
                place = tuple(slice(at, at + size) for at, size in zip(each.start, each.value.shape, strict=True))
                assert found[each.name][place].isnan().all(), f"{each.name} twice"
                found[each.name][place] = each.value
                mine += each.value.numel()
            written.append(mine)
            engine.load_parameters(cast(SavedTensors, Whole({name: value + 1 for name, value in expected.items()})))
            for name, value in engine.module.named_parameters():
                assert torch.equal(cast(DTensor, value).to_local(), engine.parts[name].cut(expected[name]) + 1), name
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert max(written) < 1.5 * sum(written) / world, "nearly equal amounts"


def test_groups_that_do_not_divide_the_processes_are_refused() -> None:
    with rank_of(0, 6) as context, pytest.raises(UserError, match=r"dp_shard_size 4: .* 6 replicas; use 2 or 3 or 6,"):
        ProcessMesh.of(context, Parallel(engine="fsdp", dp_shard_size=4))

"""Optimizers that need whole tensors take the same steps where processes hold shards of each.

Each of two processes has 2 rows of each step, in one micro-step, and nothing is clipped: engines without replicas then
add up the same two gradients of each weight, in the same precision.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import engine_work
import pytest
import torch
import torch.distributed as dist
import toy
import worlds
from engine_runs import (
    FOUR,
    TWO,
    Case,
    Runs,
    assert_close,
    assert_resumed_alike,
    checkpoint,
    contents,
    needs_deepspeed,
)
from selection import at_night
from torch import Tensor, nn

from terakoya.components import Optimizer
from terakoya.distributed.context import DistributedContext
from terakoya.plugins import registry
from terakoya.training.engines.tensor_shards import TensorShard, assign_owners, whole_names, whole_shard
from terakoya_parallel.tensor_part import TensorPart
from terakoya_parallel.whole_tensors import Holding, WholeTensors

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"type": "muon", "learning_rate": 0.01, "eps": 1.0, "neuron_beta": 0.9, "embedding_factor": 2.0},
    "stable_adamw": {"type": "stable_adamw", "learning_rate": 0.01, "betas": [0.9, 0.95]},
    "adafactor": {"type": "adafactor", "learning_rate": 0.3},
}


def test_owners_have_nearly_equal_shares_of_the_elements() -> None:
    layers = {f"{layer}.{name}": shape for layer in range(6) for name, shape in (("up", (4, 16)), ("out", (4, 4)))}
    owners = assign_owners({"head": (300,), **layers}, 3)
    assert owners == assign_owners(dict(reversed({"head": (300,), **layers}.items())), 3), "the order does not matter"
    totals = [sum(80 if name.endswith("up") else 16 for name in layers if owners[name] == each) for each in range(3)]
    assert totals[owners["head"]] == 0
    assert {owners[name] for name in layers} == {0, 1, 2} - {owners["head"]}


# ------------------------------------------------------------------------------------- one optimizer, two processes


class Blocks(nn.Module):
    """Matrices of several shapes in blocks, others outside, and one weight that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 12), nn.Linear(1, 6)])
        self.idle = nn.Parameter(torch.ones(3, 3))
        self.lonely = nn.Parameter(torch.ones(1))


def cut_by_rows(name: str, whole: Tensor, context: DistributedContext) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """`fully_shard`'s shards: of a tensor with one row the second process has none."""
    size = -(-len(whole) // 2)
    first = min(len(whole), size * context.rank)
    own = whole[first : first + size].clone()
    return own, lambda rows: [TensorShard(name, rows, tuple(whole.shape), (first, *[0] * (whole.ndim - 1)))]


def cut_flat(name: str, whole: Tensor, context: DistributedContext) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """ZeRO's: a range of the flattened tensor, here within a longer flat tensor."""
    first = whole.numel() // 3
    start, size = (0, first) if context.rank == 0 else (first, whole.numel() - first)
    own = torch.zeros(size + 2)
    own[1 : size + 1] = whole.flatten()[start : start + size]
    return own, lambda flat: [TensorShard(name, flat.narrow(0, 1, size), tuple(whole.shape), start)]


def cut_by_columns(name: str, whole: Tensor, context: DistributedContext) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Tensor parallelism's: columns of three matrices side by side, and tensors that every process has."""
    if whole.shape[-1] % 6:
        return whole.clone(), lambda values: [whole_shard(name, values)]
    part = TensorPart.whole(whole.shape).divide(whole.ndim - 1, context.rank, 2, matrices=3)
    return part.cut(whole), lambda values: part.shards(name, values)


CUTS = (cut_by_rows, cut_flat, cut_by_columns)


def step_in_shards(context: DistributedContext) -> None:
    """Takes steps of every optimizer on whole tensors and on shards, with the same gradients, and compares bits."""
    for name, values in OPTIMIZERS.items():
        plugin = (
            registry()
            .component("optimizers", name)
            .model_validate({key: value for key, value in values.items() if key != "type"})
        )
        assert isinstance(plugin, Optimizer)
        for cut in CUTS:
            torch.manual_seed(1)
            module = Blocks()
            one = copy.deepcopy(module)
            plain, sharded = plugin.build(one, fused=True), plugin.build(module, fused=True)
            names = {id(each): key for key, each in module.named_parameters()}
            seen_whole = whole_names(plugin, sharded.param_groups, names)
            assert seen_whole and ("embedding.weight" in seen_whole) == (name != "muon")
            parts = {key: cut(key, each.detach(), context) for key, each in module.named_parameters()}
            held = {key: nn.Parameter(part) for key, (part, _) in parts.items()}
            for group in sharded.param_groups:
                group["params"] = [held[names[id(each)]] for each in group["params"]]
            shapes = {key: tuple(each.shape) for key, each in module.named_parameters()}
            holdings = {key: Holding(held[key], shapes[key], parts[key][1]) for key in seen_whole}
            whole = WholeTensors(sharded, holdings, dist.group.WORLD, device=context.device)
            groups = [list(group["params"]) for group in sharded.param_groups]
            for step in range(3):
                for key, each in one.named_parameters():
                    if key != "idle" and not (step == 1 and key == "blocks.0.weight"):
                        each.grad = torch.randn_like(each)
                        held[key].grad = cut(key, each.grad, context)[0]
                plain.step()
                sharded.step()
                plain.zero_grad()
                sharded.zero_grad()
                assert [list(group["params"]) for group in sharded.param_groups] == groups
            for key, each in one.named_parameters():
                if key in seen_whole:
                    assert torch.equal(held[key], cut(key, each.detach(), context)[0]), f"{name} {cut.__name__} {key}"
            assert not any(each.numel() for each in whole.owned.values()), "between steps only the state is whole"
            mine = {shard.name: shard.value for shard in whole.state_shards()}
            every = context.gather(sorted(mine))
            assert not set(every[0]) & set(every[1])
            for key, each in one.named_parameters():
                for entry, value in plain.state.get(each, {}).items():
                    if key in whole.owned:
                        assert torch.equal(mine[f"{key}/{entry}"], value)
                    assert key not in seen_whole or f"{key}/{entry}" in every[0] + every[1]


@pytest.mark.slow
def test_a_step_on_shards_has_the_bits_of_one_on_whole_tensors(tmp_path: Path) -> None:
    toy.finish(worlds.start(step_in_shards, (1, 1), tmp_path / "said"))


# ---------------------------------------------------------------------------------------------------------- engines


FSDP = {"engine": "fsdp"}


def case(name: str, parallel: dict[str, Any], nodes: Sequence[int] = TWO, **changes: object) -> Case:
    """A run with two rows on each of two nodes, in one micro-step, with `changes` of the optimizer."""
    optimizer = {**OPTIMIZERS[name], **changes}
    own = {"batch_size": {"0": 2, "1": 2}, "optimizer": optimizer, "max_grad_norm": 0.0, "evaluation": None}
    return Case("bert", parallel, {}, own, nodes)


def learnt(out: Path) -> dict[str, Tensor]:
    """All tensors but biases of keys, whose gradient is 0 but for rounding."""
    return {name: value for name, value in contents(out).items() if "key.bias" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("name", at_night(OPTIMIZERS, always=("muon",)))
def test_fsdp_takes_the_steps_of_ddp(runs: Runs, name: str) -> None:
    """Muon's own AdamW rounds rows and whole vectors differently, as `adamw` does."""
    mine = runs.of(case(name, FSDP))
    assert_close(learnt(runs.of(case(name, {}))), learnt(mine), 1e-6 if name == "muon" else 0.0)
    assert_resumed_alike(runs, case(name, FSDP))


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing(runs: Runs) -> None:
    muon = case("muon", FSDP)
    out = runs.of(muon, checkpoint(runs.of(muon), 1), engine_work.poison)
    assert json.loads((out / "poison.json").read_text()) == [[[False, True], [False, True], [True, False]]] * 2


@pytest.mark.nightly
@needs_deepspeed
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_takes_the_steps_of_stage_0(runs: Runs, name: str) -> None:
    """Without NorMuon, which scales a row by what bf16 made of it: the other rounding of stage 3 would show."""
    changes = {"neuron_beta": None} if name == "muon" else {}
    plain = runs.of(case(name, {"engine": "deepspeed", "zero_stage": 0}, **changes))
    for stage in (1, 2, 3):
        sharded = case(name, {"engine": "deepspeed", "zero_stage": stage}, **changes)
        assert_close(learnt(plain), learnt(runs.of(sharded)), 1e-6)
        assert_resumed_alike(runs, sharded)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {"engine": "fsdp", "dp_shard_size": 2}], ids=str)
def test_other_divisions_take_the_steps_of_one_process(runs: Runs, name: str, parallel: dict[str, Any]) -> None:
    """Muon's updates are computed in bf16, where the other rounding of these gradients shows."""
    divided = case(name, parallel, TWO if "tp_size" in parallel else FOUR)
    if name != "muon":
        one = runs.run("bert", **{**divided.own, "batch_size": {"-1": 4}})
        assert_close(learnt(one), learnt(runs.of(divided)), 2e-6)
    assert_resumed_alike(runs, divided)

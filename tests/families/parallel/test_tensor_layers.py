"""How blocks are divided, and dropout inside parallel regions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kept_by_block import SIZES, kept_by_block
from lonely_group import LonelyGroup
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from terakoya.components import TensorPartition
from terakoya.plugins import registry
from terakoya_contract.toy import VOCABULARY
from terakoya_parallel.tensor_division import divide_models
from terakoya_parallel.tensor_layers import (
    TensorDivision,
    TensorParallelGroup,
    draw_own_dropout,
    partition_blocks,
)
from terakoya_parallel.tensor_part import TensorPart


def group(index: int, size: int = 2, *, sequence_parallel: bool = False) -> TensorParallelGroup:
    """A group without communication."""
    return LonelyGroup(index, size, sequence_parallel=sequence_parallel)


def test_a_fused_weight_is_divided_matrix_by_matrix() -> None:
    """Queries, keys and values with four heads of one number each: a part has two heads of each."""
    whole = torch.tensor([[1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24]])
    part = TensorPart.whole(whole.shape)
    assert part.divide(1, 0, 2, matrices=3).cut(whole).tolist() == [[1, 2, 11, 12, 21, 22]]
    assert part.divide(1, 1, 2, matrices=3).cut(whole).tolist() == [[3, 4, 13, 14, 23, 24]]
    assert part.divide(1, 2, 3).cut(whole).tolist() == [[21, 22, 23, 24]]


def test_a_part_does_not_keep_the_whole_in_memory() -> None:
    whole = torch.zeros(8, 4)
    assert TensorPart.whole(whole.shape).divide(0, 0, 2).cut(whole).untyped_storage().nbytes() == 4 * 4 * 4


class Block(nn.Module):
    """Both classes of linear layers, in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.wide, self.narrow = Conv1D(8, 4), Conv1D(4, 8)


def test_layers_are_divided_by_outputs_then_by_inputs() -> None:
    """Names of weights and frozen weights stay; a bias is divided only with outputs."""
    block = Block()
    block.wide.requires_grad_(False)
    before = {name: value.detach().clone() for name, value in block.named_parameters()}
    partition = TensorPartition(
        sizes={},
        inputs=(),
        column_parallel={"up": 1, "wide": 2},
        row_parallel=("down", "narrow"),
        divided_attributes={"": ("width",)},
    )
    division = TensorDivision()
    partition_blocks([block], partition, group(1), division, dropout=None)
    after = dict(block.named_parameters())
    assert after.keys() == before.keys() and block.width == 4
    assert {name for name, value in after.items() if not value.requires_grad} == {"wide.weight", "wide.bias"}
    expected = {
        "up.weight": before["up.weight"][4:], "up.bias": before["up.bias"][4:],
        "down.weight": before["down.weight"][:, 4:], "down.bias": before["down.bias"],
        "wide.weight": before["wide.weight"][:, [2, 3, 6, 7]], "wide.bias": before["wide.bias"][[2, 3, 6, 7]],
        "narrow.weight": before["narrow.weight"][4:], "narrow.bias": before["narrow.bias"],
    }  # fmt: skip
    assert all(torch.equal(after[name], value) for name, value in expected.items())
    assert set(division.parts) == {value for name, value in after.items() if name not in ("down.bias", "narrow.bias")}
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(block.down(hidden), hidden @ before["down.weight"][:, 4:].T + before["down.bias"])
    torch.testing.assert_close(block.narrow(hidden), hidden @ before["narrow.weight"][4:] + before["narrow.bias"])
    torch.testing.assert_close(block.up(hidden), hidden @ before["up.weight"][4:].T + before["up.bias"][4:])
    wide = hidden @ before["wide.weight"] + before["wide.bias"]
    torch.testing.assert_close(block.wide(hidden), wide[:, [2, 3, 6, 7]])


class Region(nn.Module):
    """A region of process `index`, which draws two numbers."""

    def __init__(self, index: int, block: int = 0) -> None:
        super().__init__()
        draw_own_dropout([self], [self], group(index), block, torch.device("cpu"))

    def forward(self) -> list[float]:
        """Returns the numbers."""
        return torch.rand(2).tolist()


def draws(index: int, block: int = 0, seed: int = 5) -> tuple[list[float], list[float]]:
    """The numbers that a process draws outside a region, before and after it, and inside."""
    torch.manual_seed(seed)
    region = Region(index, block)
    before, inside = torch.rand(2).tolist(), region()
    return before + torch.rand(2).tolist(), inside


def test_inside_a_region_each_process_has_its_own_dropout() -> None:
    assert draws(0)[0] == draws(1)[0]
    inside = [draws(0)[1], draws(1)[1], draws(0, block=1)[1], draws(0, seed=6)[1]]
    assert all(first != second for number, first in enumerate(inside) for second in inside[:number])
    assert draws(1) == draws(1)


def test_a_recomputed_region_draws_the_same_numbers() -> None:
    """As activation checkpointing does, from the generator's earlier state."""
    torch.manual_seed(5)
    region, state, found = Region(1), torch.get_rng_state(), []
    for seed in (5, 99):
        torch.manual_seed(seed)
        torch.set_rng_state(state)
        found.append(region())
    assert found[0] == found[1]


class Dropping(nn.Module):
    """Dropout inside a region, as in attention, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Dropout(0.5))
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which numbers were kept inside, and which outside."""
        before, inside = F.dropout(hidden, training=self.training), self.heads(hidden)
        after = F.dropout(self.out(inside), training=self.training)
        return inside != 0, torch.cat([before.flatten(), after.flatten()]) != 0


def kept(index: int, *, training: bool, sequence_parallel: bool = False) -> tuple[list[bool], list[bool]]:
    """The numbers that process `index` of two keeps inside its region and outside."""
    partition = TensorPartition(sizes={}, inputs=("heads",), column_parallel={"heads.0": 1}, row_parallel=("out",))
    block = Dropping().train(training)
    nn.init.ones_(block.heads[0].weight)  # type: ignore[arg-type]
    nn.init.ones_(block.out.weight)
    processes = group(index, sequence_parallel=sequence_parallel)
    partition_blocks([block], partition, processes, TensorDivision(), dropout=torch.device("cpu"))
    torch.manual_seed(1)
    inside, outside = block(torch.ones(1, 2, 8))
    return inside.flatten().tolist(), outside.tolist()


def test_dropout_of_an_adapter_is_inside_of_its_region() -> None:
    """Of a row-parallel layer too, whose adapter each process applies to other inputs."""
    peft = pytest.importorskip("peft")
    found, after = [], []
    for index in range(2):
        block = Dropping()
        block.heads[1].p = 0.0  # type: ignore[assignment]
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["out", "heads.0"]), block)
        partition = TensorPartition(sizes={}, inputs=("heads",), column_parallel={"heads.0": 1}, row_parallel=("out",))
        partition_blocks([block], partition, group(index), TensorDivision(), dropout=torch.device("cpu"))
        kept: list[list[bool]] = []
        for layer in (block.heads[0], block.out):
            layer.lora_dropout["default"].register_forward_hook(  # type: ignore[union-attr]
                lambda _, given, output, kept=kept: kept.append((output != 0).flatten().tolist())
            )
        torch.manual_seed(1)
        block(torch.ones(4, 8))
        found.append(kept)
        after.append(torch.rand(3).tolist())
    assert after[0] == after[1], "outside, all processes draw the same"
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_processes_have_equal_dropout_only_outside_of_regions() -> None:
    first, second = kept(0, training=True), kept(1, training=True)
    assert first[1] == second[1] and 0 < sum(first[1]) < len(first[1])
    assert len(first[0]) == len(second[0]) == 2 * 32 and first[0] != second[0]
    assert kept(0, training=True) == first
    assert all(map(all, kept(1, training=False)))


def test_processes_that_divide_positions_have_their_own_dropout_everywhere() -> None:
    """Their positions differ, so equal dropout would tie positions together."""
    first, second = (kept(index, training=True, sequence_parallel=True) for index in range(2))
    assert first[0] != second[0] and first[1] != second[1]
    assert kept(1, training=True, sequence_parallel=True) == second
    assert all(kept(1, training=False, sequence_parallel=True)[1])


def test_dropout_between_divided_layers_is_that_of_each_process() -> None:
    """Each process has another part of the middle of the feed-forward. The first masks are those of the embeddings."""
    architecture = registry().component("architectures", "modernbert_decoder")(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, mlp_dropout=0.5,
        embedding_dropout=0.5, max_position_embeddings=16,
    )  # fmt: skip

    def masks(index: int) -> list[list[bool]]:
        model, found = architecture.build(VOCABULARY, "causal"), []
        divide_models(model, [architecture], VOCABULARY, group(index), torch.device("cpu"))
        for part in model.modules():
            if isinstance(part, nn.Dropout) and part.p:
                part.register_forward_pre_hook(lambda _, given: torch.ones_like(given[0]))  # what remains 0 was dropped
                part.register_forward_hook(lambda _, given, output: found.append((output == 0).flatten().tolist()))
        torch.manual_seed(1)
        model.train()(input_ids=torch.full((2, 16), 5))
        return found

    (outside, inside), (outside_of_second, inside_of_second) = masks(0), masks(1)
    assert outside == outside_of_second and inside != inside_of_second


@pytest.mark.parametrize("name", SIZES)
def test_dividing_positions_divides_all_that_a_block_keeps(name: str) -> None:
    """Two processes keep half of it each, but for rotary tables; without, only what lies between matrix products."""
    one, tensor, sequence = (
        kept_by_block(name, processes) for processes in (None, group(0), group(0, sequence_parallel=True))
    )
    assert tensor > 0.6 * one and sequence < 0.53 * one, (one, tensor, sequence)

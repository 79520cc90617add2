"""Tensor-parallel blocks: the processes of a replica divide the matrix products of each block (Shoeybi et al., 2019,
arXiv:1909.08053).

Layers are sharded in pairs. Of the first layer each process holds some outputs (column-parallel): whole heads, or a
part of a feed-forward's middle. Of the second it holds the matching inputs (row-parallel), so everything in between
needs no other process. A pair communicates twice: the second layer's outputs are all-reduced in the forward, and the
gradient of the first layer's input in the backward. Layers must be `nn.Linear` or Conv1D; names of weights stay.

With `sequence_parallel` (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2) a process keeps its own positions
of a row between the pairs, for norms, dropout and residuals: the all-reduce becomes a reduce-scatter after a pair and
an all-gather before the next one, which send as much together. Hidden states are cut where they enter the first block,
and whole again after the last one.

An adapter (LoRA) is divided with its layer: beside outputs its second matrix, beside inputs its first one. The other
matrix is whole on every process, which applies it to its own part of the activations, so its gradients are summed. What
an adapter adds to a row-parallel layer is all-reduced with the layer's own products.

Letters in shapes: B rows, T positions, t = T / P of them, H hidden size, P processes of a replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from terakoya.components import TensorPartition
from terakoya.toolkit.random_keys import torch_seed
from terakoya_parallel import fp8_scales
from terakoya_parallel.adapted_layers import find_layer, input_layers, output_layers
from terakoya_parallel.region_borders import Border, GatheredBorder, all_gather, multiply, reduce_scatter
from terakoya_parallel.tensor_part import TensorPart

LINEAR = (nn.Linear, Conv1D)
"""The layers that can be sharded; Conv1D, GPT-2's, has weights (inputs, outputs)."""


@dataclass(frozen=True)
class TensorParallelGroup(ABC):
    """The processes that share a replica's blocks, seen from one of them.

    Attributes:
        index: this process's number in the group.
        size: number of processes.
        sequence_parallel: whether each process keeps its own positions of hidden states between parallel regions.
    """

    index: int
    size: int
    sequence_parallel: bool = field(default=False, kw_only=True)

    @abstractmethod
    def all_reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """Returns the sum, or else the largest, of all processes' `values`, the same bits on each. The result has its
        own memory: `values` stays unchanged for those that keep it, such as selective activation checkpointing."""

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Returns the sum of all processes' `values` (B, T, H) at this process's positions, (B, t, H)."""
        return self.cut(self.all_reduce(values))

    def all_gather(self, part: Tensor) -> Tensor:
        """Returns `part` (B, t, H) of all processes, (B, T, H), the same bits on each."""
        before = self.index * part.shape[1]
        after = (self.size - 1) * part.shape[1] - before
        return self.all_reduce(F.pad(part, (0, 0, before, after)))

    def cut(self, values: Tensor) -> Tensor:
        """Returns `values` (B, T, H) at this process's positions, (B, t, H), in memory of their own."""
        return values.unflatten(1, (self.size, -1))[:, self.index].clone(memory_format=torch.contiguous_format)

    @property
    def summed(self) -> Border:
        """The border of a parallel region whose surroundings are whole on every process."""
        return Border(_keep, self.all_reduce)

    @property
    def blocks(self) -> Border:
        """The border of all blocks, within which a process keeps its own positions."""
        return Border(self.cut, self.all_gather)


@dataclass(frozen=True)
class ProcessTensorParallelGroup(TensorParallelGroup):
    """A tensor-parallel group over a torch process `group`."""

    group: dist.ProcessGroup

    def all_reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return total

    def reduce_scatter(self, values: Tensor) -> Tensor:
        return reduce_scatter(values, 1, self.group)

    def all_gather(self, part: Tensor) -> Tensor:
        return all_gather(part, 1, self.group)


def _keep(values: Tensor) -> Tensor:
    return values.view_as(values)


def dropout_generator(device: torch.device) -> torch.Generator:
    """The random generator of dropout on `device`."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def draw_own_dropout(
    inputs: Sequence[nn.Module],
    outputs: Sequence[nn.Module],
    group: TensorParallelGroup,
    block: int,
    device: torch.device,
) -> None:
    """Makes each process of `group` draw its own dropout, in training, from before one of `inputs` to after one of
    `outputs`: inside a parallel region, because their heads differ, and in a whole block where their positions differ.

    Elsewhere all processes of a replica draw the same numbers, from equally seeded generators. Here the generator is
    seeded for the process and the `block`; afterwards its outer state is restored. The seeds are functions of the
    micro-step's seed, so a recomputed block draws the same numbers again.
    """
    generator = dropout_generator(device)
    outside: list[Tensor] = []

    def begin(module: nn.Module, given: Any) -> None:
        if module.training:
            outside[:] = [generator.get_state()]
            generator.manual_seed(torch_seed(generator.initial_seed(), "tensor_part", block, group.index))

    def end(module: nn.Module, given: Any, output: Any) -> None:
        if module.training:
            generator.set_state(outside.pop())

    for module in inputs:
        module.register_forward_pre_hook(begin)
    for module in outputs:
        module.register_forward_hook(end)


def enter_at(module: nn.Module, border: Border) -> None:
    """Makes the first argument of `module`, which is positional or named `hidden_states`, enter at `border`."""

    def enter(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (border.enter(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": border.enter(named["hidden_states"])}

    module.register_forward_pre_hook(enter, with_kwargs=True)


def leave_at(module: nn.Module, border: Border) -> None:
    """Makes the output of `module`, or the first of several, leave at `border`."""

    def leave(module: nn.Module, given: Any, output: Any) -> Any:
        return (border.leave(output[0]), *output[1:]) if isinstance(output, tuple) else border.leave(output)

    module.register_forward_hook(leave)


def add_bias_after(layer: nn.Module) -> None:
    """Makes `layer`, a linear one or one with an adapter, add its bias where its forward hooks so far have ended, and
    not before: each process's product is a part of a sum, to which the bias is added once. In 8 bits its
    forward leaves the bias out already."""
    linear = input_layers(layer)[0]
    linear.__dict__.setdefault("forward", MethodType(multiply, linear))  # a method: blocks share their graphs

    def add_bias(module: nn.Module, given: Any, total: Tensor) -> Tensor:
        bias: Any = linear.bias
        return total if bias is None else total + bias.to(total.dtype)

    layer.register_forward_hook(add_bias)


@dataclass(frozen=True)
class TensorDivision:
    """How layers are divided.

    Attributes:
        parts: the part that this process has of each divided parameter.
        in_region: parameters that each process has whole and applies to its own part of the activations: their
            gradients must be summed.
    """

    parts: dict[nn.Parameter, TensorPart] = field(default_factory=dict)
    in_region: set[nn.Parameter] = field(default_factory=set)

    def divide(self, whole: Tensor, axis: int, group: TensorParallelGroup, *, matrices: int = 1) -> nn.Parameter:
        """Returns a new parameter, this process's part of `whole` along `axis`, where `matrices` may be side by
        side."""
        part = TensorPart.whole(whole.shape).divide(axis, group.index, group.size, matrices=matrices)
        own = nn.Parameter(part.cut(whole.detach()), requires_grad=whole.requires_grad)
        self.parts[own] = part
        return own


def partition_blocks(
    blocks: Sequence[nn.Module],
    partition: TensorPartition,
    group: TensorParallelGroup,
    division: TensorDivision,
    *,
    dropout: torch.device | None,
    first: int = 0,
) -> None:
    """Replaces the whole weights in `blocks` by this process's parts, and inserts the communication. A divided
    parameter keeps its name and is a new object.

    Args:
        division: what is divided, to which that of the blocks is added.
        dropout: the device of the computation if the regions, or blocks with divided positions, apply dropout, else
            None.
        first: the number of the first block, so that no two draw the same dropout.
    """
    for number, block in enumerate(blocks, first):
        border = group.summed
        inside = [find_layer(block, name) for name in partition.local]
        inputs = [find_layer(block, name) for name in partition.inputs]
        outputs = [find_layer(block, name) for name in partition.row_parallel]
        if group.sequence_parallel:
            border, inside = GatheredBorder(group.all_gather, group.reduce_scatter), [block]
            if block is blocks[0]:
                enter_at(block, group.blocks)
            if block is blocks[-1]:
                leave_at(block, group.blocks)
        if dropout is not None:
            begin, end = ([block], [block]) if group.sequence_parallel else (inputs, outputs)
            draw_own_dropout(begin, end, group, number, dropout)
        for name, matrices in partition.column_parallel.items():
            layer = find_layer(block, name)
            for each in output_layers(layer):
                _divide_layer(each, group, division, outputs=True, matrices=matrices)
            if isinstance(border, GatheredBorder):
                for each in input_layers(layer):
                    border.keep_own_input(each)
            inside += input_layers(layer)[1:]
        for layer in outputs:
            for each in input_layers(layer):
                _divide_layer(each, group, division, outputs=False)
            leave_at(layer, border)
            add_bias_after(layer)
            inside += output_layers(layer)[1:]
        for layer in inputs:
            enter_at(layer, border)
        for module in block.modules():  # what is whole may see parts of heads or positions
            if isinstance(module, nn.Linear) and module.weight not in division.parts:
                fp8_scales.share_scales(module, group, inputs=True, outputs=True)
        for name, attributes in partition.divided_attributes.items():
            _divide_attributes(find_layer(block, name), attributes, group.size)
        division.in_region.update(
            value for module in inside for value in module.parameters() if value not in division.parts
        )


def _divide_layer(
    layer: nn.Module, group: TensorParallelGroup, division: TensorDivision, *, outputs: bool, matrices: int = 1
) -> None:
    """Keeps this process's part of the outputs of `layer`, or else of its inputs. The bias belongs to the outputs."""
    assert isinstance(layer, LINEAR), f"{type(layer).__name__} is not a linear layer"
    axis = int(isinstance(layer, Conv1D) == outputs)  # Conv1D has weights (inputs, outputs), Linear the reverse
    layer.weight = division.divide(layer.weight, axis, group, matrices=matrices)
    if outputs and layer.bias is not None:
        layer.bias = division.divide(layer.bias, 0, group, matrices=matrices)
    width = {True: ("out_features", "nf"), False: ("in_features", "nx")}[outputs][isinstance(layer, Conv1D)]
    _divide_attributes(layer, (width,), group.size)
    fp8_scales.share_scales(layer, group, inputs=not outputs, outputs=outputs)


def _divide_attributes(module: nn.Module, attributes: Sequence[str], size: int) -> None:
    for name in attributes:
        count = getattr(module, name)
        assert count % size == 0, f"{name} {count} is not divisible by {size} processes"
        setattr(module, name, count // size)

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
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from terakoya.components import TensorPartition
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.engines.region_borders import Border, GatheredBorder
from terakoya.training.engines.tensor_shards import TensorPart
from terakoya.training.model.adapted_layers import base_name, find_layer, input_layers, output_layers

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
        """See `TensorParallelGroup`."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return total

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """See `TensorParallelGroup`."""
        parts = [each.contiguous() for each in values.chunk(self.size, 1)]
        own = torch.empty_like(parts[self.index])
        dist.reduce_scatter(own, parts, group=self.group)
        return own

    def all_gather(self, part: Tensor) -> Tensor:
        """See `TensorParallelGroup`."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, 1)


def _keep(values: Tensor) -> Tensor:
    return values.view_as(values)


class LocalDropout:
    """Dropout that must differ between processes: inside a parallel region, because their heads differ, and in a whole
    block where their positions differ.

    Elsewhere all processes of a replica draw the same numbers, from equally seeded generators. Here the generator is
    seeded for the process and the block; afterwards its outer state is restored. The seeds are functions of the
    micro-step's seed, so a recomputed block draws the same numbers again.
    """

    def __init__(self, group: TensorParallelGroup, block: int, device: torch.device) -> None:
        self.group = group
        self.block = block
        self.generator = (
            torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        )
        self.outside: Tensor | None = None

    def begin(self) -> None:
        """Seeds the generator for this process and block."""
        self.outside = self.generator.get_state()
        seed = hash_u64(self.generator.initial_seed(), "tensor_part", self.block, self.group.index)
        self.generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)

    def end(self) -> None:
        """Restores the generator state from before `begin`."""
        assert self.outside is not None, "end() without begin()"
        self.generator.set_state(self.outside)
        self.outside = None


class EnterHook:
    """A forward pre-hook that passes a module's first argument over a `border`."""

    def __init__(self, border: Border | None, dropout: LocalDropout | None) -> None:
        self.border = border
        self.dropout = dropout

    def __call__(
        self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the module's arguments; the first is positional or named `hidden_states`."""
        if self.dropout is not None and module.training:
            self.dropout.begin()
        if self.border is None:
            return given, named
        if given:
            return (self.border.enter(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": self.border.enter(named["hidden_states"])}


class LeaveHook:
    """A forward hook that passes a module's output, or the first of several, over a `border`. With `row_parallel`, the
    module, or the one with its adapter, it adds the bias once."""

    def __init__(
        self, border: Border | None, dropout: LocalDropout | None, row_parallel: RowParallel | None = None
    ) -> None:
        self.border = border
        self.dropout = dropout
        self.row_parallel = row_parallel

    def __call__(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        """Returns the module's output."""
        if self.dropout is not None and module.training:
            self.dropout.end()
        if self.border is None:
            return output
        if isinstance(output, tuple):
            return self.border.leave(output[0]), *output[1:]
        total = self.border.leave(output)
        bias = None if self.row_parallel is None else self.row_parallel.bias
        return total if bias is None else total + bias.to(total.dtype)


class RowParallel(nn.Module):
    """Replaces a linear layer of which each process holds some inputs; keeps the parameters of that layer. Returns the
    product of its part, to which `LeaveHook` adds those of the other processes, and the bias."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
        self.weight = weight
        self.bias = bias
        self.outputs_last = isinstance(layer, Conv1D)
        self.train(layer.training)

    def forward(self, part: Tensor) -> Tensor:
        """Returns this process's summand (B, T, H) of the outputs, from `part` (B, T, inputs / P)."""
        return F.linear(part, self.weight.T if self.outputs_last else self.weight)


def partition_blocks(
    blocks: Sequence[nn.Module],
    partition: TensorPartition,
    group: TensorParallelGroup,
    *,
    dropout: torch.device | None,
    first: int = 0,
) -> dict[nn.Parameter, TensorPart]:
    """Replaces the whole weights in `blocks` by this process's parts, and inserts the communication.

    Args:
        dropout: the device of the computation if the regions, or blocks with divided positions, apply dropout, else
            None.
        first: the number of the first block, so that no two draw the same dropout.

    Returns:
        the part that this process has of each divided parameter. Such a parameter keeps its name and is a new object.
    """
    parts: dict[nn.Parameter, TensorPart] = {}
    for number, block in enumerate(blocks, first):
        local_dropout = None if dropout is None else LocalDropout(group, number, dropout)
        border = group.summed
        if group.sequence_parallel:
            border = GatheredBorder(group.all_gather, group.reduce_scatter)
            enter = EnterHook(group.blocks if block is blocks[0] else None, local_dropout)
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(LeaveHook(group.blocks if block is blocks[-1] else None, local_dropout))
            local_dropout = None
        for name, matrices in partition.column_parallel.items():
            for layer in output_layers(find_layer(block, name)):
                parts |= _divide_layer(layer, group, outputs=True, matrices=matrices)
            if isinstance(border, GatheredBorder):
                for layer in input_layers(find_layer(block, name)):
                    border.keep_own_input(layer)
        for name in partition.row_parallel:
            for layer in input_layers(find_layer(block, name)):
                parts |= _divide_layer(layer, group, outputs=False)
            base = base_name(block, name)
            row_parallel = RowParallel(block.get_submodule(base))
            block.set_submodule(base, row_parallel)
            find_layer(block, name).register_forward_hook(LeaveHook(border, local_dropout, row_parallel))
        for name in partition.inputs:
            hook = EnterHook(border, local_dropout)
            find_layer(block, name).register_forward_pre_hook(hook, with_kwargs=True)
        for name, attributes in partition.divided_attributes.items():
            _divide_attributes(find_layer(block, name), attributes, group.size)
    return parts


def partly_applied(
    blocks: Sequence[nn.Module], partition: TensorPartition, group: TensorParallelGroup, parts: Container[nn.Parameter]
) -> set[nn.Parameter]:
    """Returns the parameters in `blocks` that each process has whole, as they are not in `parts`, and applies to its
    own part of the activations: their gradients must be summed over the processes."""
    modules: list[nn.Module] = []
    for block in blocks:
        modules += [block] if group.sequence_parallel else [find_layer(block, name) for name in partition.local]
        for name in partition.column_parallel:
            modules += input_layers(find_layer(block, name))[1:]
        for name in partition.row_parallel:
            modules += output_layers(find_layer(block, name))[1:]
    return {value for module in modules for value in module.parameters() if value not in parts}


def _divide_layer(
    layer: nn.Module, group: TensorParallelGroup, *, outputs: bool, matrices: int = 1
) -> Mapping[nn.Parameter, TensorPart]:
    """Keeps this process's part of the outputs of `layer`, or else of its inputs; returns its new parameters. The bias
    belongs to the outputs."""
    assert isinstance(layer, LINEAR), f"{type(layer).__name__} is not a linear layer"
    axis = int(isinstance(layer, Conv1D) == outputs)  # Conv1D has weights (inputs, outputs), Linear the reverse
    axes = {"weight": (axis, matrices)}
    if outputs and layer.bias is not None:
        axes["bias"] = (0, matrices)
    new_parameters = {}
    for name, (axis, side_by_side) in axes.items():
        whole = getattr(layer, name)
        part = TensorPart.whole(whole.shape).divide(axis, group.index, group.size, matrices=side_by_side)
        own = nn.Parameter(part.cut(whole.detach()), requires_grad=whole.requires_grad)
        setattr(layer, name, own)
        new_parameters[own] = part
    width = {True: ("out_features", "nf"), False: ("in_features", "nx")}[outputs][isinstance(layer, Conv1D)]
    _divide_attributes(layer, (width,), group.size)
    return new_parameters


def _divide_attributes(module: nn.Module, attributes: Sequence[str], size: int) -> None:
    for name in attributes:
        count = getattr(module, name)
        assert count % size == 0, f"{name} {count} is not divisible by {size} processes"
        setattr(module, name, count // size)

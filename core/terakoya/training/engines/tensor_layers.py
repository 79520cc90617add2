"""Blocks whose matrix products the processes of a replica share (Shoeybi et al., 2019, arXiv:1909.08053).

Layers are cut in pairs. Of the first each process has some of the outputs (its columns): whole heads, a part of a
feed-forward's middle. Of the second it has the matching inputs (its rows), so that what stands between needs nobody
else; the second's outputs are added up over processes, and so is, in the backward, the gradient of what went into the
first: one reduction a pair forward, one backward. Names of weights stay as they are.

Letters in shapes: B rows, T positions, H hidden size, P processes of a replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from terakoya.components import TensorPartition
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.engines.tensor_shards import TensorShard

LINEAR = (nn.Linear, Conv1D)
"""The layers that can be cut: Conv1D, GPT-2's, has its weights as (inputs, outputs)."""


@dataclass(frozen=True)
class TensorParallelGroup(ABC):
    """Where this process stands among those that share its blocks.

    Attributes:
        index: its place among them.
        size: how many they are.
    """

    index: int
    size: int

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of all processes' `values`, the same bits on each, in memory of its own: whoever keeps `values`,
        selective activation checkpointing for one, finds them unchanged."""


@dataclass(frozen=True)
class ProcessTensorParallelGroup(TensorParallelGroup):
    """A place among the processes of `group`."""

    group: dist.ProcessGroup

    def all_reduce(self, values: Tensor) -> Tensor:
        """See `TensorParallelGroup`."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


@dataclass(frozen=True)
class WeightPartition:
    """How one weight is cut.

    Attributes:
        axis: along which it is cut.
        pieces: how many matrices lie side by side along it; each is cut by itself.
        place: whose part this process has.
    """

    axis: int
    pieces: int
    place: TensorParallelGroup

    def own(self, whole: Tensor) -> Tensor:
        """This process's part of the weight `whole`, in memory of its own."""
        parted = whole.unflatten(self.axis, (self.pieces, self.place.size, -1)).select(self.axis + 1, self.place.index)
        return parted.flatten(self.axis, self.axis + 1).clone(memory_format=torch.contiguous_format)

    def boxes(self, name: str, own: Tensor) -> Iterator[TensorShard]:
        """Where this process's `own` part of the weight `name` lies in the whole."""
        size = own.shape[self.axis] // self.pieces
        shape, start = list(own.shape), [0] * own.ndim
        shape[self.axis] *= self.place.size
        for piece in range(self.pieces):
            start[self.axis] = (piece * self.place.size + self.place.index) * size
            yield TensorShard(name, own.narrow(self.axis, piece * size, size), tuple(shape), tuple(start))


class _Enter(torch.autograd.Function):
    """What all processes have goes into the part of one: as it is; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, place: TensorParallelGroup) -> Tensor:
        ctx.place = place
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.place.all_reduce(gradients[0]), None


class _Leave(torch.autograd.Function):
    """What the parts have made is added up; its gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: TensorParallelGroup) -> Tensor:
        return place.all_reduce(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class LocalDropout:
    """Dropout inside of a part, which other processes must not draw alike: their heads are others.

    Outside of parts all processes of a replica draw the same, from a generator that all have seeded alike. Inside it is
    seeded for the place and the block, and afterwards stands where it stood. Seeds are functions of the one that the
    micro-step began with, so a block that is computed again draws again what it drew.
    """

    def __init__(self, place: TensorParallelGroup, block: int, device: torch.device) -> None:
        self.place = place
        self.block = block
        self.generator = (
            torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        )
        self.outside: Tensor | None = None

    def begin(self) -> None:
        """Draws from here on are this process's own."""
        self.outside = self.generator.get_state()
        seed = hash_u64(self.generator.initial_seed(), "tensor_part", self.block, self.place.index)
        self.generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)

    def end(self) -> None:
        """Draws are everybody's again."""
        assert self.outside is not None, "a part ends that did not begin"
        self.generator.set_state(self.outside)
        self.outside = None


class Entry:
    """A hook before a module's forward: its first argument, whole, goes into this process's part."""

    def __init__(self, place: TensorParallelGroup, dropout: LocalDropout | None) -> None:
        self.place = place
        self.dropout = dropout

    def __call__(
        self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments; the first is by position or named `hidden_states`."""
        if self.dropout is not None and module.training:
            self.dropout.begin()
        if given:
            return (_Enter.apply(given[0], self.place), *given[1:]), named
        return given, {**named, "hidden_states": _Enter.apply(named["hidden_states"], self.place)}


class RowParallel(nn.Module):
    """A linear layer of whose inputs each process has a part, with the weights of the layer it stands for."""

    def __init__(self, layer: nn.Module, place: TensorParallelGroup, dropout: LocalDropout | None) -> None:
        super().__init__()
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
        self.weight = weight
        self.bias = bias
        self.outputs_last = isinstance(layer, Conv1D)
        self.place = place
        self.dropout = dropout
        self.train(layer.training)

    def forward(self, part: Tensor) -> Tensor:
        """From `part` (B, T, inputs / P) the whole output (B, T, H), the same on every process."""
        if self.dropout is not None and self.training:
            self.dropout.end()
        made = F.linear(part, self.weight.T if self.outputs_last else self.weight)
        whole: Tensor = _Leave.apply(made, self.place)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


def partition_blocks(
    blocks: Sequence[nn.Module], partition: TensorPartition, place: TensorParallelGroup, *, dropout: torch.device | None
) -> dict[nn.Parameter, WeightPartition]:
    """Leaves in `blocks`, whole models' own, what the process at `place` works on.

    Args:
        dropout: the device that computes, where dropout is drawn inside of parts; else None.

    Returns:
        how each parameter that was cut is cut. It has its name still and is a new object.
    """
    cuts: dict[nn.Parameter, WeightPartition] = {}
    for number, block in enumerate(blocks):
        own = None if dropout is None else LocalDropout(place, number, dropout)
        for name, pieces in partition.column_parallel.items():
            cuts |= _cut(block.get_submodule(name), place, outputs=True, pieces=pieces)
        for name in partition.row_parallel:
            layer = block.get_submodule(name)
            cuts |= _cut(layer, place, outputs=False)
            block.set_submodule(name, RowParallel(layer, place, own))
        for name in partition.inputs:
            block.get_submodule(name).register_forward_pre_hook(Entry(place, own), with_kwargs=True)
        for name, attributes in partition.divided_attributes.items():
            _divide(block.get_submodule(name), attributes, place.size)
    return cuts


def _cut(
    layer: nn.Module, place: TensorParallelGroup, *, outputs: bool, pieces: int = 1
) -> Mapping[nn.Parameter, WeightPartition]:
    """Leaves in `layer` a part of its outputs, or else of its inputs; returns its new parameters. A bias belongs to the
    outputs."""
    assert isinstance(layer, LINEAR), f"{type(layer).__name__} is no linear layer"
    along = int(isinstance(layer, Conv1D) == outputs)  # Conv1D has weights (inputs, outputs), Linear the reverse
    cuts = {"weight": WeightPartition(along, pieces, place)}
    if outputs and layer.bias is not None:
        cuts["bias"] = WeightPartition(0, pieces, place)
    made = {}
    for name, cut in cuts.items():
        whole = getattr(layer, name)
        part = nn.Parameter(cut.own(whole.detach()), requires_grad=whole.requires_grad)
        setattr(layer, name, part)
        made[part] = cut
    side = {True: ("out_features", "nf"), False: ("in_features", "nx")}[outputs][isinstance(layer, Conv1D)]
    _divide(layer, (side,), place.size)
    return made


def _divide(module: nn.Module, attributes: Sequence[str], size: int) -> None:
    for name in attributes:
        count = getattr(module, name)
        assert count % size == 0, f"{name} {count} over {size} processes is no whole number"
        setattr(module, name, count // size)

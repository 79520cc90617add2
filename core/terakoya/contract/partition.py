"""What an architecture promises of `tensor_partition`: processes that share its blocks compute what one does alone.

The processes are threads here, each with its part of the same model, which wait for each other to add up.

Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from terakoya.components import Architecture, TensorPartition
from terakoya.contract.findings import NotLookedAt, Wrong
from terakoya.training.engines.tensor_layers import LINEAR, TensorParallelGroup, WeightPartition, partition_blocks

SIZE = 2
"""Processes that share a model."""
TOLERANCE = 1e-4
SECONDS = 60.0


@dataclass(frozen=True)
class Meeting:
    """Where threads add up what each has brought."""

    brought: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=SECONDS))

    def add(self, index: int, values: Tensor) -> Tensor:
        """The sum of what all bring, the same for each."""
        self.brought[index] = values
        self.barrier.wait()
        total = torch.stack([self.brought[each] for each in range(SIZE)]).sum(0)
        self.barrier.wait()
        return total


@dataclass(frozen=True)
class Thread(TensorParallelGroup):
    """A place that is a thread's."""

    meeting: Meeting

    def all_reduce(self, values: Tensor) -> Tensor:
        """See `TensorParallelGroup`."""
        return self.meeting.add(self.index, values)


@dataclass(frozen=True)
class Computed:
    """Hidden states (B, T, H), and by parameter's name the gradient of a number made of them, and how it is cut."""

    hidden: Tensor
    gradients: Mapping[str, Tensor]
    cuts: Mapping[str, WeightPartition]


def check(architecture: Architecture, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> None:
    """Tries `models`, 1 + SIZE equal ones of which all but the first are then cut, on `batch`.

    Raises:
        Wrong: what is computed together is not what is computed alone.
        NotLookedAt: the architecture cannot be cut, or its toy sizes cannot.
    """
    partition = architecture.tensor_partition()
    if partition is None:
        raise NotLookedAt("tensor_partition is None: parallel.tp_size is refused")
    odd = {name: size for name, size in partition.sizes.items() if size % SIZE}
    if odd:
        raise NotLookedAt(f"its trial has {odd}, which {SIZE} processes cannot share; give even sizes in `trial`")
    _names(architecture, models[0], partition)
    expected = _compute(architecture, models[0], batch, {})
    meeting = Meeting()

    def one(index: int) -> Computed:
        model = models[1 + index]
        try:
            with torch.enable_grad():
                place = Thread(index, SIZE, meeting)
                blocks = architecture.blocks(model)
                return _compute(architecture, model, batch, partition_blocks(blocks, partition, place, dropout=None))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(SIZE) as pool:
        waiting = [pool.submit(one, index) for index in range(SIZE)]
    errors = [error for each in waiting if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    _compare(expected, [each.result() for each in waiting], _on_parts(architecture, models[0], partition))


def _names(architecture: Architecture, model: nn.Module, partition: TensorPartition) -> None:
    """Raises Wrong where `partition` names what the blocks do not have."""
    for block in architecture.blocks(model):
        there = dict(block.named_modules())
        for name in (*partition.entries, *partition.columns, *partition.rows, *partition.on_parts, *partition.counts):
            if name not in there:
                raise Wrong(f"its blocks have no {name}; they have {', '.join(filter(None, there))}")
        for name in (*partition.columns, *partition.rows):
            if not isinstance(there[name], LINEAR):
                raise Wrong(f"{name} is a {type(there[name]).__name__}; only linear layers can be cut")


def _on_parts(architecture: Architecture, model: nn.Module, partition: TensorPartition) -> frozenset[str]:
    """The names of the weights that each process has whole and applies to its own part."""
    applied = {
        value
        for block in architecture.blocks(model)
        for name in partition.on_parts
        for value in block.get_submodule(name).parameters()
    }
    return frozenset(name for name, value in model.named_parameters() if value in applied)


def _compute(
    architecture: Architecture,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    cuts: Mapping[nn.Parameter, WeightPartition],
) -> Computed:
    hidden = architecture.hidden(model, batch)
    (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    values = dict(model.named_parameters())
    return Computed(
        hidden.detach(),
        {name: value.grad for name, value in values.items() if value.grad is not None},
        {name: cuts[value] for name, value in values.items() if value in cuts},
    )


def _compare(expected: Computed, found: Sequence[Computed], on_parts: frozenset[str]) -> None:
    """Raises Wrong where what was computed together is not what was computed alone."""
    whole = torch.cat([each.flatten() for each in expected.gradients.values()]).norm()
    for computed in found:
        error = float((computed.hidden - expected.hidden).abs().max() / expected.hidden.abs().max())
        if error > TOLERANCE:
            raise Wrong(
                f"hidden states of {SIZE} processes that share the blocks are off by {error:.1g}: are all layers "
                "between an entry and its rows in columns, fused ones with how many matrices they hold, and all that "
                "counts heads in counts?"
            )
        for name, gradient in computed.gradients.items():
            alone = expected.gradients[name]
            if name in computed.cuts:
                alone = computed.cuts[name].own(alone)
            if name in on_parts:
                gradient = torch.stack([each.gradients[name] for each in found]).sum(0)
            if (gradient - alone).norm() > TOLERANCE * (alone.norm() + 0.01 * whole):
                raise Wrong(
                    f"the gradient of {name} is not that of one process: is what goes into the part of one in entries, "
                    "and what each process applies to its own part alone, a norm of heads, in on_parts?"
                )

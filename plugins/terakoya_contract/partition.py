"""The check of `tensor_partition`: processes that share an architecture's blocks compute the same as one process.

The processes are threads here. Each has its part of the same model and waits for the others at each all-reduce. They
compute twice: with hidden states whole on each, and with their own positions of them (`parallel.sequence_parallel`).

Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terakoya.components import Architecture, TensorPartition
from terakoya_contract.results import CheckFailed, CheckSkipped
from terakoya_contract.toy import VOCABULARY
from terakoya_parallel.tensor_division import divide_models
from terakoya_parallel.tensor_layers import LINEAR, TensorDivision, TensorParallelGroup
from terakoya_parallel.tensor_part import TensorPart

SIZE = 2
"""Number of processes that share a model."""
TOLERANCE = 1e-4
SECONDS = 60.0


FORGOTTEN = (
    "are all layers between an input and its row_parallel layer in column_parallel, fused layers with their number of "
    "matrices, and all modules that hold a number of heads in divided_attributes?",
    "are the modules whose input goes into the shared layers in inputs, and those that each process applies to its own "
    "part, such as a norm of heads, in local?",
)
"""What a partition may lack, as questions: where hidden states are wrong, and where a gradient is."""
READS_POSITIONS = (
    "does anything between the shared layers read several positions, such as a convolution? Then set positions to "
    "False",
) * 2


@dataclass(frozen=True)
class ThreadSum:
    """Adds up one tensor of each thread."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=SECONDS))

    def add(self, index: int, values: Tensor, *, largest: bool) -> Tensor:
        """The sum, or else the largest, of the `values` of all threads, the same in each; `index` is the number of this
        thread."""
        self.tensors[index] = values
        self.barrier.wait()
        every = torch.stack([self.tensors[each] for each in range(SIZE)])
        self.barrier.wait()
        return every.amax(0) if largest else every.sum(0)


@dataclass(frozen=True)
class ThreadGroup(TensorParallelGroup):
    """A tensor-parallel group whose processes are threads."""

    thread_sum: ThreadSum

    def all_reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        return self.thread_sum.add(self.index, values, largest=largest)


@dataclass(frozen=True)
class Computed:
    """Hidden states (B, T, H) and, of a model with a vocabulary head, logits (B, T, V); by parameter name, the gradient
    of a weighted sum of them and how it is divided; names whose gradients must be summed over the processes."""

    hidden: Tensor
    logits: Tensor | None
    gradients: Mapping[str, Tensor]
    cuts: Mapping[str, TensorPart]
    summed: Set[str]


def check_partition(architecture: Architecture, models: Sequence[PreTrainedModel], batch: Mapping[str, Tensor]) -> None:
    """Runs `batch` through `models`: 1 + SIZE equal models, of which all but the first share their blocks, and as many
    again that also divide positions.

    Raises:
        CheckFailed: processes that share the blocks compute something else than one process.
        CheckSkipped: the architecture cannot be shared, or not at its toy sizes.
    """
    partition = architecture.tensor_partition()
    if partition is None:
        raise CheckSkipped("tensor_partition is None: parallel.tp_size is refused")
    odd = {name: size for name, size in partition.sizes.items() if size % SIZE}
    if odd:
        raise CheckSkipped(
            f"its test_settings have {odd}, which {SIZE} processes cannot share; give even sizes in `test_settings`"
        )
    whole, *others = models
    _check_names(architecture, whole, partition)
    expected = _compute(architecture, whole, batch, TensorDivision())
    _compare(expected, _compute_in_threads(architecture, others[:SIZE], batch), "the blocks", FORGOTTEN)
    if partition.positions:
        results = _compute_in_threads(architecture, others[SIZE:], batch, sequence_parallel=True)
        _compare(expected, results, "positions, too,", READS_POSITIONS)


def _compute_in_threads(
    architecture: Architecture,
    models: Sequence[PreTrainedModel],
    batch: Mapping[str, Tensor],
    *,
    sequence_parallel: bool = False,
) -> list[Computed]:
    """Returns what each of the processes, one for each of `models`, computes."""
    thread_sum = ThreadSum()

    def compute(index: int) -> Computed:
        model = models[index]
        try:
            with torch.enable_grad():
                group = ThreadGroup(index, SIZE, thread_sum, sequence_parallel=sequence_parallel)
                division = divide_models(model, [architecture], VOCABULARY, group, torch.device("cpu"))
                return _compute(architecture, model, batch, division)
        except BaseException:
            thread_sum.barrier.abort()
            raise

    with ThreadPoolExecutor(SIZE) as pool:
        futures = [pool.submit(compute, index) for index in range(SIZE)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def _check_names(architecture: Architecture, model: nn.Module, partition: TensorPartition) -> None:
    """Raises CheckFailed where `partition` names a module that the blocks lack, or cuts one that is not linear."""
    for block in architecture.blocks(model):
        modules = dict(block.named_modules())
        for name in (
            *partition.inputs,
            *partition.column_parallel,
            *partition.row_parallel,
            *partition.local,
            *partition.divided_attributes,
        ):
            if name not in modules:
                raise CheckFailed(f"its blocks have no {name}; they have {', '.join(filter(None, modules))}")
        for name in (*partition.column_parallel, *partition.row_parallel):
            if not isinstance(modules[name], LINEAR):
                raise CheckFailed(f"{name} is a {type(modules[name]).__name__}; only linear layers can be cut")


def _compute(
    architecture: Architecture, model: PreTrainedModel, batch: Mapping[str, Tensor], division: TensorDivision
) -> Computed:
    hidden = architecture.hidden(model, batch)
    total = (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum()
    logits = None
    if model.get_output_embeddings() is not None:
        logits = architecture.logits(model, hidden)
        total = total + (logits * torch.linspace(-1, 1, logits.shape[-1])).sum()
        logits = logits.detach()
    total.backward()
    values = dict(model.named_parameters())
    return Computed(
        hidden.detach(),
        logits,
        {name: value.grad for name, value in values.items() if value.grad is not None},
        {name: division.parts[value] for name, value in values.items() if value in division.parts},
        {name for name, value in values.items() if value in division.in_region},
    )


def _compare(expected: Computed, results: Sequence[Computed], shared: str, forgotten: tuple[str, str]) -> None:
    """Raises CheckFailed where the `results` of several processes, which have `shared` among themselves, differ from
    `expected`, the result of one; the message asks what may be `forgotten`."""
    whole = torch.cat([each.flatten() for each in expected.gradients.values()]).norm()
    for computed in results:
        error = float((computed.hidden - expected.hidden).abs().max() / expected.hidden.abs().max())
        if error > TOLERANCE:
            raise CheckFailed(
                f"hidden states of {SIZE} processes that share {shared} are off by {error:.1g}: {forgotten[0]}"
            )
        if computed.logits is not None and expected.logits is not None:
            is_whole = computed.logits.shape == expected.logits.shape
            if not is_whole or (computed.logits - expected.logits).norm() > TOLERANCE * expected.logits.norm():
                raise CheckFailed(
                    f"logits of {SIZE} processes that share the vocabulary are not those of one process: does the "
                    "model use the weights of its head or embeddings otherwise than by calling them? Then set "
                    "vocabulary to False"
                )
        for name, gradient in computed.gradients.items():
            reference = expected.gradients[name]
            if name in computed.cuts:
                reference = computed.cuts[name].cut(reference)
            if name in computed.summed:
                gradient = torch.stack([each.gradients[name] for each in results]).sum(0)
            if (gradient - reference).norm() > TOLERANCE * (reference.norm() + 0.01 * whole):
                raise CheckFailed(
                    f"the gradient of {name} in {SIZE} processes that share {shared} is not that of one process: "
                    f"{forgotten[1]}"
                )

"""Conflicts of kinds of parallelism with other settings of a run: see `terakoya.config.conflicts`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from terakoya import plugins
from terakoya.components import Architecture
from terakoya.components.rows import WIDTH_STEP

if TYPE_CHECKING:
    from terakoya.config.fields import ParameterFields


def find_problems(parameters: ParameterFields) -> Iterator[str]:
    """Yields each conflict of `parameters.parallel`, as `conflicts.find_conflicts` does."""
    if parameters.parallel.tp_size > 1:
        yield from _tensor_parallel_conflicts(parameters)
    if parameters.parallel.pp_size > 1:
        yield from _pipeline_parallel_conflicts(parameters)
    if parameters.parallel.position_processes > 1:
        yield from _sequence_parallel_conflicts(parameters)


def _tensor_parallel_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of tensor parallelism, with the nearest settings that work."""
    parallel, optimizer = parameters.parallel, parameters.optimizer
    processes = parallel.tp_size
    key = f"parallel.tp_size {processes}"
    for architecture in parameters.objective.architectures(parameters.architecture):
        name, partition = type(architecture).__name__, architecture.tensor_partition()
        if partition is None:
            supporting = sorted(
                offer.name
                for offer in plugins.registry().components()
                if issubclass(offer.component, Architecture)
                and offer.component.tensor_partition is not Architecture.tensor_partition
                and offer.component.partition_obstacle is None
            )
            obstacle = type(architecture).partition_obstacle
            reason = f"cannot: {obstacle}" if obstacle else "does not define how (`tensor_partition`)"
            yield (
                f"{key}: processes share the layers of {', '.join(supporting)}, but architecture {name} {reason}. "
                'Set it to 1; "engine": "fsdp" splits the weights of any architecture'
            )
            continue
        sizes = partition.sizes
        uneven = [f"{each} {size}" for each, size in sizes.items() if size % processes]
        if uneven:
            second = "" if architecture is parameters.architecture else " (of the objective's second model)"
            common = math.gcd(*sizes.values())
            divisors = [str(size) for size in range(1, common + 1) if common % size == 0]
            yield (
                f"parallel.tp_size {processes}: {' and '.join(uneven)} of architecture {name}{second} cannot be shared "
                f"evenly; use {_one_of(divisors)}"
            )
        if parallel.sequence_parallel and not partition.positions:
            yield (
                f"parallel.sequence_parallel: outside of what {key} divides, the blocks of architecture {name} read "
                "several positions at once, so that no process can do with its own (`TensorPartition.positions`); set "
                "it to false"
            )
    if parallel.sequence_parallel:
        shares = [f" with {each} {size}" for each in ("sp_size", "cp_size") if (size := getattr(parallel, each)) > 1]
        yield from _uneven_positions(
            parameters,
            f"parallel.sequence_parallel among {key}{''.join(shares)}",
            processes * parallel.position_processes,
        )
    if not optimizer.elementwise and not optimizer.tensorwise:
        yield (
            f"{key}: optimizer {type(optimizer).__name__} needs all weights at once (it is neither elementwise nor "
            "tensorwise), but each process has a part of them; use another optimizer, or set it to 1"
        )


def _pipeline_parallel_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of pipeline parallelism, with the nearest settings that work."""
    architecture, objective, parallel = parameters.architecture, parameters.objective, parameters.parallel
    key, name = f"parallel.pp_size {parallel.pp_size}", type(architecture).__name__
    alternative = 'Set it to 1; "engine": "fsdp" splits the weights of any architecture'
    offers = plugins.registry().components()
    if type(architecture).keep_stage_blocks is Architecture.keep_stage_blocks:
        supporting = sorted(
            offer.name
            for offer in offers
            if issubclass(offer.component, Architecture)
            and offer.component.keep_stage_blocks is not Architecture.keep_stage_blocks
            and "causal" in offer.component.heads  # of the objectives that can be cut
        )
        yield (
            f"{key}: architecture {name} does not define how it is cut into stages (`keep_stage_blocks`); "
            f"{', '.join(supporting)} do. {alternative}"
        )
    if not objective.single_forward:
        supporting = sorted(offer.name for offer in offers if getattr(offer.component, "single_forward", False))
        yield (
            f"{key}: objective {type(objective).__name__} cannot be cut into stages: only {', '.join(supporting)} run "
            f"one model once and need nothing else but its head. {alternative}"
        )
    if parallel.pp_schedule == "zero_bubble" and parameters.activation_checkpointing is not None:
        yield (
            f'activation_checkpointing: "{parameters.activation_checkpointing}" would compute a block again for the '
            "gradients of hidden states and once more for those of weights, which parallel.pp_schedule "
            '"zero_bubble" separates; set it to null, or use "pp_schedule": "1f1b"'
        )
    stages = parallel.pp_size * parallel.pp_stages_per_process
    blocks: int | None = getattr(architecture, "num_hidden_layers", None)
    if blocks is None:
        return
    if blocks < stages:
        fewer = blocks // parallel.pp_size
        nearest = f"pp_stages_per_process {fewer}" if fewer else f"pp_size {blocks}"
        both = f"{key} with pp_stages_per_process {parallel.pp_stages_per_process}"
        yield (
            f"{key if parallel.pp_stages_per_process == 1 else both}: {stages} stages need at least {stages} blocks, "
            f"but architecture {name} has {blocks}; use {nearest}"
        )
    first = -(-blocks // stages)
    if parameters.frozen_layers >= first:
        yield (
            f"frozen_layers: the first of {stages} stages has {first} of {blocks} blocks and needs one to train: with "
            f"{key} expected at most {first - 1}, got {parameters.frozen_layers}"
        )


def _sequence_parallel_conflicts(parameters: ParameterFields) -> Iterator[str]:
    """Conflicts of sequence and context parallelism, with the nearest settings that work."""
    architecture, objective, parallel = parameters.architecture, parameters.objective, parameters.parallel
    processes, exchanges_heads = parallel.position_processes, parallel.sp_size > 1
    key = f"parallel.{'sp_size' if exchanges_heads else 'cp_size'} {processes}"
    name, length = type(architecture).__name__, parameters.data.sequence_length
    alternative = 'set it to 1, with "activation_checkpointing": "full" if a row is too long for one process'
    if architecture.document_masking != "attention_interface":
        yield f"{key}: is for models that use Transformers' AttentionInterface, which {name} does not; {alternative}"
    if not objective.sums_by_position():
        yield f"{key}: {type(objective).__name__} with these settings needs whole rows; {alternative}"
    if parameters.precision == "fp8":
        yield f'precision: "fp8" scales the tensors of each process separately, and {key} splits them; use "bf16"'
    heads: int | None = getattr(architecture, "num_attention_heads", None)
    tensor = parallel.tp_size
    if exchanges_heads and heads is not None and heads % (processes * tensor):
        heads //= math.gcd(heads, tensor)
        divisors = [str(size) for size in range(2, heads + 1) if heads % size == 0 and length % size == 0]
        yield (
            f"{key}: the {heads} attention heads of {name} cannot be shared evenly; with rows of {length} tokens use "
            f'{_one_of(divisors or ["1"])}, or "cp_size" instead'
        )
    yield from _uneven_positions(parameters, key, processes)


def _one_of(sizes: Sequence[str]) -> str:
    return f"one of {', '.join(sizes)}" if len(sizes) > 1 else sizes[0]


def _uneven_positions(parameters: ParameterFields, key: str, processes: int) -> Iterator[str]:
    """Conflicts where the positions of a row are no multiple of `processes`, with the nearest lengths that are."""
    length, bound = parameters.data.sequence_length, parameters.architecture.max_sequence_length()
    if length % processes:
        around = (length // processes * processes, -(-length // processes) * processes)
        nearest = [str(each) for each in around if each >= 8 and (bound is None or each <= bound)]
        yield (
            f"data.sequence_length: {key} splits positions evenly: expected a multiple of {processes}, got "
            f"{length}; the nearest: {' and '.join(nearest) or 'none'}"
        )
    layout = parameters.objective.row_layout().kind
    if layout in ("lines", "pairs") and WIDTH_STEP % processes:
        yield (
            f'{key}: in the layout "{layout}" rows are as wide as the longest of their batch, in multiples of '
            f"{WIDTH_STEP}, which {processes} processes cannot split evenly; use a divisor of {WIDTH_STEP}, or another "
            "objective.layout"
        )

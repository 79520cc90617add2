"""Estimates what a run needs: parameters, operations, memory of each rank by part, disk, hours. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from terakoya.checking.model_check import check_model
from terakoya.config import batch_table
from terakoya.config.conflicts import takes_cuda_graphs
from terakoya.config.parameters import Parameters, resolve_length
from terakoya.distributed.topology import ProcessInfo, RankBatch, Topology, rank_batches
from terakoya.errors import UserError
from terakoya_planning import devices
from terakoya_planning.devices import Device
from terakoya_planning.fake_step import ModelSizes, model_sizes
from terakoya_planning.row_statistics import RowStatistics, row_statistics
from terakoya_planning.speed import Speed, planned_speed
from terakoya_planning.step_memory import Memory, measure

Measure = Callable[[Parameters, int, RankBatch, int], Speed | None]
"""Measures the speed of a run on this machine: of the parameters, the size of the vocabulary, the rows of the first
rank and the number of processes. None where it cannot."""


@dataclass(frozen=True)
class Estimate:
    """The needs of a run, in bytes, elements, operations; `steps`, `flops`, `speed` and `hours` are None where unknown.

    Attributes:
        sizes: elements of the model.
        tokens_per_step: real tokens of an optimizer step, over all processes.
        flops_per_step, flops: forward and backward of a step, and of the run.
        checkpoint: bytes of `state` and `model`; `disk` is the space for the checkpoints that are kept and one more.
        speed: how long a step takes, and how that is known.
        hours: the shortest and the longest time of all steps and validations; equal where the speed was measured.
        notes: assumptions.
    """

    sizes: ModelSizes
    memory: Memory
    processes: int
    engine: str
    zero_stage: int | None
    pipeline_stages: int
    share: RankBatch
    tokens_per_step: float
    flops_per_step: float
    steps: int | None
    flops: float | None
    checkpoint: Mapping[str, int]
    disk: int
    device: Device
    speed: Speed | None
    hours: tuple[float, float] | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the tensors fit into the device's memory, on a CPU with the offloaded ones; None: unknown."""
        if self.device.memory is None:
            return None
        needed = self.memory.peak + (0 if self.device.gpu else sum(self.memory.offloaded.values()))
        return needed < self.device.memory

    def as_json(self) -> dict[str, Any]:
        """All fields and the peak, for JSON."""
        memory = {**asdict(self.memory), "peak": self.memory.peak}
        return {**asdict(self), "memory": memory}


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """Where a run is estimated to train, and how fast.

    Attributes:
        processes: by default the fewest that the run can use.
        device: of each process; by default this machine's.
        vocab_size: size of the vocabulary, if the stores do not exist yet.
        mfu: the expected fraction of the device's bfloat16 peak; or
        tflops: the expected TFLOP/s of a device, as `tflops` in a run's metrics.
        measure_speed: measures the speed where the devices are this machine's and the run fits; see `measure_here`.
    """

    processes: int | None = None
    device: str | None = None
    vocab_size: int | None = None
    mfu: float | None = None
    tflops: float | None = None
    measure_speed: Measure | None = None


def estimate(
    parameters: Path | str | Mapping[str, Any] | Parameters, *, overrides: Sequence[str] | str = (), **options: Any
) -> Estimate:
    """Estimates the run of `parameters`, with `overrides` (`a.b=value`) over their values, both as for `train`.
    `options` are the fields of `EstimateOptions`. Raises UserError for anything the user can fix: parameters, a missing
    store, an unknown device.

    Memory is measured on tensors without data, in one step of the run's own module, engine and micro-batch; see
    `fake_step`. Models of more than four layers are measured with two and with four layers and extrapolated linearly.
    """
    loaded = Parameters.of(parameters, overrides)
    given = EstimateOptions(**options)
    processes = given.processes
    target = devices.find_device(given.device) if given.device else devices.local_device()
    loaded = loaded.with_precision(devices.precision_on(target))
    statistics = row_statistics(loaded.data, loaded.objective.row_layout(), given.vocab_size)
    if processes is None:
        parallel, nodes = loaded.parallel, len(batch_table.node_names(loaded.batch_size))
        processes = math.lcm(nodes, parallel.replica_size * (parallel.dp_shard_size or 1))
    share = first_rank_batch(
        loaded.batch_size, loaded.micro_batch_size, replica_size=loaded.parallel.replica_size, processes=processes
    )
    check_model(loaded, statistics.vocabulary)
    sizes = model_sizes(loaded, statistics.vocabulary, context=statistics.context)
    measure_run = partial(
        measure, vocabulary=statistics.vocabulary, share=share, sizes=sizes, processes=processes, gpu=target.gpu,
        documents_per_row=statistics.documents_per_row,
    )  # fmt: skip
    memory, optimizer_bytes, notes = measure_run(loaded)
    is_tried = target.gpu and loaded.cuda_graphs == "auto" and takes_cuda_graphs(loaded, processes)
    if is_tried and target.memory is not None and memory.peak >= target.memory:
        needed = f"{memory.peak / 1e9:.2f} GB"
        memory, optimizer_bytes, notes = measure_run(loaded.model_copy(update={"cuda_graphs": False}))
        notes = (*notes, f"with CUDA graphs the tensors would take {needed}, so the run trains without")
    tokens = share.global_rows * statistics.tokens_per_row
    steps = _steps(loaded, statistics, share)
    flops = None if steps is None else sizes.flops_per_token * tokens * steps
    kept = loaded.kept_checkpoints(steps or 0) + 1
    state = sizes.saved_bytes + optimizer_bytes + loaded.count_event_bytes(sizes.trained)
    checkpoint = {"state": state, "model": sizes.model_bytes}
    estimated = Estimate(
        sizes, memory, processes, loaded.parallel.engine, loaded.parallel.zero_stage,
        loaded.parallel.pp_size * loaded.parallel.pp_stages_per_process, share, tokens,
        flops_per_step=sizes.flops_per_token * tokens, steps=steps, flops=flops,
        checkpoint=checkpoint, disk=sum(checkpoint.values()) * kept,
        device=target, speed=None, hours=None, notes=(*_assumptions(statistics, steps), *notes),
    )  # fmt: skip
    speed = None
    is_given = given.mfu is not None or given.tflops is not None
    if given.measure_speed is not None and not is_given and devices.is_here(target) and estimated.fits is not False:
        speed = given.measure_speed(loaded, statistics.vocabulary.size, share, processes)
    if speed is None:
        speed = planned_speed(
            loaded, target, processes=processes, share=share, flops_per_step=estimated.flops_per_step,
            mfu=given.mfu, tflops=given.tflops,
        )  # fmt: skip
    return estimated if speed is None else with_speed(estimated, speed, loaded, statistics.validation_rows)


def with_speed(estimated: Estimate, speed: Speed, parameters: Parameters, validated: int | None = None) -> Estimate:
    """Returns the estimate with its hours at this `speed`: those of the steps and of the validations, in each of which
    `validated` rows are read; by default all that `evaluation.batches` allows."""
    if estimated.steps is None:
        return replace(estimated, speed=speed)
    steps, every = float(estimated.steps), parameters.evaluation
    if every is not None:
        most = every.batches * estimated.share.global_rows * max(1, len(parameters.data.validation))
        validations = 1 + -(-estimated.steps // every.steps)  # before the first step, and at the end
        steps += validations * min(most, validated or most) / estimated.share.global_rows * speed.evaluation
    return replace(estimated, speed=speed, hours=(steps * speed.low / 3600, steps * speed.high / 3600))


def first_rank_batch(
    batch_size: Mapping[str, int], micro_batch_size: int | None, *, replica_size: int, processes: int
) -> RankBatch:
    """Returns rank 0's part of each batch, with `processes` divided equally among the nodes of `batch_size`. Raises
    UserError if the nodes do not divide the processes, or the numbers are incompatible."""
    hosts = batch_table.node_names(batch_size)
    nodes = len(hosts)
    if processes % nodes:
        raise UserError(
            f"--processes: batch_size has {nodes} nodes, which need equally many processes each; got {processes} in all"
        )
    per_node = processes // nodes
    places = tuple(
        ProcessInfo(rank, rank // per_node, rank % per_node, hosts[rank // per_node]) for rank in range(processes)
    )
    return rank_batches(batch_size, micro_batch_size, Topology(places, replica_size))[0]


def _steps(parameters: Parameters, statistics: RowStatistics, share: RankBatch) -> int | None:
    """The run's optimizer steps; None if they depend on stores that do not exist."""
    if statistics.rows is None and parameters.epochs is not None:
        return None
    length = resolve_length(
        parameters, rows=statistics.rows or 1, tokens_per_row=statistics.tokens_per_row, global_rows=share.global_rows
    )
    return length.steps


def _assumptions(statistics: RowStatistics, steps: int | None) -> list[str]:
    notes = [] if statistics.known else ["the stores do not exist: rows are assumed to be full, with one document each"]
    if steps is None:
        notes.append(
            "epochs: the number of steps, and of the checkpoints that event plugins keep, depends on the stores"
        )
    return notes

"""What a run will take: parameters, operations, memory of each rank by part, disk, hours. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from terakoya.components import batch_table
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters, resolve_length
from terakoya.errors import UserError
from terakoya.estimation import devices
from terakoya.estimation.devices import Device
from terakoya.estimation.engine_memory import Sharding, memory_per_process, offloaded_memory
from terakoya.estimation.fake_step import ModelSizes, model_sizes, simulate_step
from terakoya.estimation.synthetic_rows import RowStatistics, row_statistics
from terakoya.rows import loader
from terakoya.training.distributed.topology import ProcessInfo, RankBatch, Topology, rank_batches

READ_AHEAD = loader.AHEAD + 1
"""Steps whose batches a process holds on the host beside the one it works on: those that are ready, one being made."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors that one rank holds.

    Attributes:
        parts: by part, at the moment when most are live.
        moment: the part of a step in which that is.
        moments: the most in each part of a step.
        offloaded: beside them, by part what an engine keeps on the host.
        interpreter: beside them, memory of the process itself: interpreter and libraries, measured here.
        read_ahead: beside them, batches on the host that wait for their step.
    """

    parts: Mapping[str, int]
    moment: str
    moments: Mapping[str, int]
    offloaded: Mapping[str, int]
    interpreter: int
    read_ahead: int

    @property
    def peak(self) -> int:
        """All tensors at that moment."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Estimate:
    """What a run will take. Bytes, elements, operations; `steps`, `flops` and `hours` are None where not known.

    Attributes:
        sizes: elements of the model.
        tokens_per_step: real tokens of an optimizer step, all processes.
        flops_per_step, flops: forward and backward of a step, and of the run.
        checkpoint: bytes of `state` and `model`; `disk` is what the run needs for those it keeps and one more.
        mfu: the share of the device's peak that `hours` go by.
        notes: what was assumed.
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
    mfu: float | None
    hours: float | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the device's memory holds the tensors, a CPU's those that are offloaded too; None: not known."""
        if self.device.memory is None:
            return None
        there = self.memory.peak + (0 if self.device.gpu else sum(self.memory.offloaded.values()))
        return there < self.device.memory

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        memory = {**asdict(self.memory), "peak": self.memory.peak}
        return {**asdict(self), "memory": memory}


def estimate(
    parameters: Path | Parameters,
    *,
    processes: int | None = None,
    device: str | None = None,
    vocab_size: int | None = None,
    mfu: float | None = None,
    tflops: float | None = None,
    overrides: tuple[str, ...] = (),
) -> Estimate:
    """What the run of `parameters` takes in `processes` processes, each with one `device` (default: this machine's).
    Where their number is not said they are the fewest that it can run in.

    Memory is measured on tensors without data, in one step of the run's own module, engine and micro-batch; see
    `simulation`. Models of more than four layers are measured with two and with four, what follows being linear.

    Args:
        vocab_size: the vocabulary, where stores are not there yet.
        mfu: the share of the device's bfloat16 peak that is expected; or
        tflops: what a device is expected to do, as a run's `tflops` says.
        overrides: `a.b=value` over a parameter file's.

    Raises:
        UserError: anything the user can mend: parameters, a missing store, an unknown device.
    """
    loaded = Parameters.load(parameters, overrides) if isinstance(parameters, Path) else parameters
    target = devices.find_device(device) if device else devices.local_device()
    text = row_statistics(loaded, vocab_size)
    if processes is None:
        processes = math.lcm(len(batch_table.node_names(loaded.batch_size)), loaded.parallel.replica_size)
    share = first_rank_batch(loaded, processes)
    held = model_sizes(loaded, text.vocabulary, context=text.context)
    memory, optimizer_bytes, notes = measure(loaded, text.vocabulary, share, held, processes=processes, gpu=target.gpu)
    tokens = share.global_rows * text.tokens_per_row
    steps = _steps(loaded, text, share)
    flops = None if steps is None else held.flops_per_token * tokens * steps
    speed, used = _speed(loaded, target, mfu, tflops)
    hours = flops / (processes * speed * 1e12) / 3600 if flops is not None and speed else None
    kept = loaded.checkpoint.keep + 1
    checkpoint = {"state": held.saved_bytes + optimizer_bytes, "model": held.model_bytes}
    return Estimate(
        held, memory, processes, loaded.parallel.engine, loaded.parallel.zero_stage,
        loaded.parallel.pp_size * loaded.parallel.pp_stages_per_process, share, tokens,
        flops_per_step=held.flops_per_token * tokens, steps=steps, flops=flops,
        checkpoint=checkpoint, disk=sum(checkpoint.values()) * kept,
        device=target, mfu=used, hours=hours, notes=(*_assumed(text, steps), *notes),
    )  # fmt: skip


def measure(
    parameters: Parameters, vocabulary: Vocabulary, share: RankBatch, held: ModelSizes, *, processes: int, gpu: bool
) -> tuple[Memory, int, tuple[str, ...]]:
    """The memory of each rank, the bytes of the whole optimizer state, and what was assumed."""
    parallel = parameters.parallel
    world = Sharding(
        processes, parallel.zero_stage, share.micro_steps,
        cut=parallel.engine == "fsdp" and processes > 1, offloaded=parallel.offloaded,
    )  # fmt: skip
    interpreter = _resident()
    found = simulate_step(
        parameters, vocabulary, rows=share.micro_batch_size, gradients_stay=world.gradients_stay, gpu=gpu
    )
    windows = memory_per_process(found.windows, world, held)
    moments = {name: sum(parts.values()) for name, parts in windows.items()}
    moment = max(moments, key=moments.__getitem__)
    parts = {part: size for part, size in sorted(windows[moment].items(), key=lambda each: -each[1]) if size}
    ahead = READ_AHEAD * share.micro_steps * found.batch_bytes
    notes = []
    if found.depths:
        notes.append(f"layers are alike: memory follows from models of {' and '.join(map(str, found.depths))} layers")
    if parallel.replica_size > 1:
        notes.append(f"memory is that of a whole replica; {parallel.replica_size} processes share it: see --gpus")
    offloaded = offloaded_memory(found.windows, world, held)
    if offloaded and gpu:
        notes.append(
            "pinned memory is given out in powers of two: what is offloaded takes up to twice as much of the host"
        )
    if gpu:
        notes.append("a GPU's own context and what its allocator leaves unused between tensors come on top")
    return Memory(parts, moment, moments, offloaded, interpreter, ahead), found.optimizer_bytes, tuple(notes)


def first_rank_batch(parameters: Parameters, processes: int) -> RankBatch:
    """What rank 0 of `processes` takes of each batch, nodes having equally many of them.

    Raises:
        UserError: the batch table has more nodes than there are processes, or their numbers do not go together.
    """
    hosts = batch_table.node_names(parameters.batch_size)
    nodes = len(hosts)
    if processes % nodes:
        raise UserError(
            f"--processes: batch_size has {nodes} nodes, of which each needs as many processes; got {processes} in all"
        )
    each = processes // nodes
    places = tuple(ProcessInfo(rank, rank // each, rank % each, hosts[rank // each]) for rank in range(processes))
    return rank_batches(
        parameters.batch_size, parameters.micro_batch_size, Topology(places, parameters.parallel.replica_size)
    )[0]


def _steps(parameters: Parameters, text: RowStatistics, share: RankBatch) -> int | None:
    """The run's optimizer steps; None where they depend on stores that are not there."""
    if text.rows is None and parameters.epochs is not None:
        return None
    rows = text.rows or 1
    length = resolve_length(parameters, rows=rows, tokens_per_row=text.tokens_per_row, global_rows=share.global_rows)
    return length.steps


def _speed(
    parameters: Parameters, device: Device, mfu: float | None, tflops: float | None
) -> tuple[float | None, float | None]:
    """TFLOP/s that a device is taken to do, None where nothing says, and the share of its peak that this is."""
    if tflops is not None:
        return tflops, tflops / device.peak_tflops if device.peak_tflops else None
    if device.peak_tflops is None:
        if mfu is not None:
            raise UserError(f"--mfu: the peak of {device.name} is not known; say what it does: --tflops 0.05")
        return None, None
    used = devices.USUAL_MFU[parameters.precision] if mfu is None else mfu
    return used * device.peak_tflops, used


def _assumed(text: RowStatistics, steps: int | None) -> list[str]:
    notes = [] if text.known else ["the stores are not there: rows are taken to be full, and one document each"]
    if steps is None:
        notes.append("epochs: how many steps that is depends on the stores")
    return notes


def _resident() -> int:
    """Bytes of this process in memory: the interpreter and all libraries of a training process, and no tensors."""
    import psutil

    return int(psutil.Process().memory_info().rss)

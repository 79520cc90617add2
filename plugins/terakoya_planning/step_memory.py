"""Memory of each rank in a step of a run, by part, measured on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.conflicts import takes_cuda_graphs
from terakoya.config.parameters import Parameters
from terakoya.distributed.topology import RankBatch
from terakoya.rows import loader
from terakoya_planning.engine_memory import FLOAT16, FLOAT32, Sharding, memory_per_process, offloaded_memory
from terakoya_planning.fake_step import ModelSizes, keeps_bf16, simulate_step
from terakoya_planning.memory_tracker import ACTIVATIONS

READ_AHEAD = loader.AHEAD + 1
"""Steps whose batches a process holds on the host besides the current one: those that are ready, and one in
progress."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors that one rank holds.

    Attributes:
        parts: bytes by part, at the peak of the step.
        moment: the window of the step with the peak.
        offloaded: in addition, by part, what is kept on the host in the place of the device.
        interpreter: in addition, memory of the process itself: interpreter and libraries, measured here.
        read_ahead: in addition, batches on the host that wait for their step.
    """

    parts: Mapping[str, int]
    moment: str
    offloaded: Mapping[str, int]
    interpreter: int
    read_ahead: int

    @property
    def peak(self) -> int:
        """Bytes of all tensors at the peak."""
        return sum(self.parts.values())


def measure(
    parameters: Parameters,
    vocabulary: Vocabulary,
    share: RankBatch,
    sizes: ModelSizes,
    *,
    processes: int,
    gpu: bool,
    documents_per_row: float = 1.0,
) -> tuple[Memory, int, tuple[str, ...]]:
    """Returns the memory of each rank, the bytes of the whole optimizer state, and the assumptions."""
    parallel = parameters.parallel
    replicas = processes // parallel.replica_size
    # processes that divide the weights under `fully_shard`
    sharing = parallel.shard_size(replicas) * parallel.position_processes
    fully_sharded = parallel.engine == "fsdp" and sharing > 1
    sharding = Sharding(
        sharing if fully_sharded else processes, parallel.zero_stage, share.micro_steps,
        fully_sharded=fully_sharded, offloaded=parallel.offloaded,
        gathered=FLOAT32 if parameters.precision == "fp32" else FLOAT16,
        outside=FLOAT16 if keeps_bf16(parameters) else FLOAT32,
        cuda_graphs=gpu and takes_cuda_graphs(parameters, processes),
    )  # fmt: skip
    interpreter = int(psutil.Process().memory_info().rss)  # and all libraries, without tensors
    simulation = simulate_step(
        parameters, vocabulary, rows=share.micro_batch_size, gradients_stay=sharding.gradients_stay, gpu=gpu,
        documents_per_row=documents_per_row,
    )  # fmt: skip
    windows = memory_per_process(simulation.windows, sharding, sizes)
    shards = sharding.processes if fully_sharded or parallel.zero_stage else 1
    beside = parameters.count_event_bytes(-(-sizes.trained // shards))
    if beside:
        windows = {name: {**parts, "event plugins": beside} for name, parts in windows.items()}
    moment = max(windows, key=lambda name: sum(windows[name].values()))
    parts = {part: size for part, size in sorted(windows[moment].items(), key=lambda item: -item[1]) if size}
    read_ahead = READ_AHEAD * share.micro_steps * simulation.batch_bytes
    notes = []
    if simulation.depths:
        depths = " and ".join(map(str, simulation.depths))
        notes.append(f"layers are equal: memory is extrapolated from models of {depths} layers")
    if parallel.replica_size > 1:
        notes.append(f"memory is that of a whole replica, which {parallel.replica_size} processes share: see --gpus")
    offloaded = offloaded_memory(simulation.windows, sharding, sizes)
    if simulation.on_host:
        offloaded[ACTIVATIONS] = simulation.on_host
    if offloaded and gpu:
        notes.append("pinned memory is allocated in powers of two: offloading takes up to twice as much of the host")
    if sharding.cuda_graphs:
        notes.append("CUDA graphs keep the memory of a micro-step all the time")
    if gpu:
        notes.append("a GPU's own context and the fragmentation of its allocator come on top")
    return Memory(parts, moment, offloaded, interpreter, read_ahead), simulation.optimizer_bytes, tuple(notes)

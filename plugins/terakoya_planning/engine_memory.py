"""Memory that each process holds in a step under an engine that shards it: DDP, ZeRO in our DeepSpeed engine, and
torch's `fully_shard`.

ZeRO's numbers follow DeepSpeed's own sources. Everything is float32. Gradients are reduced through one flat buffer; in
stages 1 and 2 it is allocated whole from the first gradient to the end of the backward, and copied once more to be
sent. In these stages weights are in a flat copy, next to the part that this process updates. Stage 1 keeps whole
gradients until the end of the backward, stage 2 moves them into the buffer as they arrive. Stage 3 holds this process's
part twice, keeps small parameters whole everywhere, and gathers the others while they are needed; prefetched weights
arrive in one flat buffer, from which they are copied.

`offloaded_memory` counts what is offloaded: the part that this process updates, its state, and its gradients, which are
sent to the host as they arrive, from the device's flat buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from terakoya.config.deepspeed import BUCKET, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from terakoya.training.engines.tensor_shards import assign_owners
from terakoya_planning.fake_step import FORWARD, LATE_BACKWARD, STEP, ModelSizes
from terakoya_planning.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    SCRATCH,
    WEIGHTS,
)

COMMUNICATION = "communication"
GRAPHS = "kept by CUDA graphs"
IN_GRAPHS = (ACTIVATIONS, LOGITS, CAST_WEIGHTS, SCRATCH, GRADIENTS)
"""What a micro-step allocates, which CUDA graphs allocate once."""
LIVE = 1_000_000_000
"""Elements that stage 3 gathers at most before it frees some (`stage3_max_live_parameters`)."""
AHEAD = 50_000_000
"""Elements that stage 3 prefetches (`stage3_prefetch_bucket_size`)."""
FLOAT32, FLOAT16 = 4, 2


@dataclass(frozen=True)
class Sharding:
    """How a run's processes divide its state.

    Attributes:
        processes: number of processes that divide it.
        zero_stage: DeepSpeed's stage; None for another engine.
        micro_steps: micro-steps of an optimizer step.
        fully_sharded: whether torch's `fully_shard` shards the weights; else, without a stage, the engine is DDP.
        offloaded: what ZeRO keeps on the host, by DeepSpeed's names.
        gathered: bytes of an element of a block that `fully_shard` gathers: 2 where the run computes in 16 bits.
        outside: the same of what is in no block. Gradients of what is 2 there, too, are float32.
        cuda_graphs: whether micro-steps are recorded as CUDA graphs.
    """

    processes: int
    zero_stage: int | None
    micro_steps: int
    fully_sharded: bool = False
    offloaded: Set[str] = frozenset()
    gathered: int = FLOAT32
    outside: int = FLOAT32
    cuda_graphs: bool = False

    @property
    def gradients_stay(self) -> bool:
        """Whether whole gradients exist when a forward begins: those of an earlier micro-step, or, with DDP, the
        buckets that always hold them."""
        if self.fully_sharded:
            return False
        if self.zero_stage is None:
            return self.processes > 1 or self.micro_steps > 1
        return self.micro_steps > 1 and self.zero_stage < 2


def memory_per_process(
    windows: Mapping[str, Mapping[str, int]], sharding: Sharding, sizes: ModelSizes
) -> dict[str, dict[str, int]]:
    """Bytes by part of each process, in each of `windows`, which hold the bytes of a process without sharding.

    `sizes` are the model's. DDP's buckets are the gradients' own memory.
    """
    result = {name: dict(parts) for name, parts in windows.items()}
    for name, parts in result.items():
        if sharding.fully_sharded:
            _apply_fully_shard(parts, sharding, sizes, step=name == STEP)
        elif sharding.zero_stage == 0:
            if sharding.processes > 1 and name == STEP:  # gradients are reduced after the backward
                parts[COMMUNICATION] = min(sizes.trained, BUCKET) * FLOAT32
        elif sharding.zero_stage is not None:
            _apply_zero(parts, sharding, sizes, window=name)
            _subtract_offloaded(parts, sharding, sizes, window=name)
        if sharding.fully_sharded or sharding.zero_stage:
            _apply_whole_tensors(parts, sharding, sizes, step=name == STEP)
    whole = sizes.trained * FLOAT32
    if sharding.cuda_graphs:
        _add_graph_memory(result, outside=sharding.gradients_stay)
    assert all(parts.get(GRADIENTS, 0) <= 2 * whole for parts in result.values())
    return result


def _add_graph_memory(windows: Mapping[str, dict[str, int]], *, outside: bool) -> None:
    """Adds to the `windows` of a step what CUDA graphs keep: all that a micro-step allocates is theirs all the time,
    and they read batches from a copy. Gradients that are summed or reduced are `outside` of it once more."""
    pool = max(sum(parts.get(name, 0) for name in IN_GRAPHS) for parts in windows.values())
    batch = max(parts.get(BATCH, 0) for parts in windows.values())
    for parts in windows.values():
        own = sum(parts.get(name, 0) for name in IN_GRAPHS if not (outside and name == GRADIENTS))
        parts[GRAPHS] = batch + pool - own


def _apply_zero(parts: dict[str, int], sharding: Sharding, sizes: ModelSizes, *, window: str) -> None:
    """Changes `parts` to the bytes of a process in DeepSpeed's stage 1, 2 or 3, in that `window` of a step."""
    own = _own_bytes(sizes.trained, sharding)
    bucket = min(sizes.trained, BUCKET) * FLOAT32
    step = window == STEP
    parts[OPTIMIZER] = -(-parts.get(OPTIMIZER, 0) // sharding.processes)
    if sharding.zero_stage != 3:
        parts[WEIGHTS] = parts.get(WEIGHTS, 0) + own
        parts[COMMUNICATION] = 0 if step or window == FORWARD else bucket
        if step:  # this process's gradients, and a flat copy of them
            parts[GRADIENTS] = 2 * own
        elif sharding.zero_stage == 2:
            # those of earlier micro-steps, or of earlier buckets
            parts[GRADIENTS] = own if sharding.micro_steps > 1 or sizes.trained > BUCKET else 0
            if window == LATE_BACKWARD:
                parts[COMMUNICATION] += bucket
        return
    parts[COMMUNICATION] = bucket
    parts[GRADIENTS] = own
    buffers = max(0, parts.get(WEIGHTS, 0) - sizes.parameters * FLOAT32)  # buffers are not sharded
    gathered = sizes.small if step else min(sizes.parameters, max(LIVE, sizes.small))
    parts[WEIGHTS] = buffers + own + _own_bytes(sizes.parameters, sharding) + gathered * FLOAT32
    if not step:
        parts[COMMUNICATION] += min(sizes.parameters, AHEAD) * FLOAT32


def _subtract_offloaded(parts: dict[str, int], sharding: Sharding, sizes: ModelSizes, *, window: str) -> None:
    """Subtracts from `parts` what is on the host: see `offloaded_memory`."""
    if OFFLOAD_OPTIMIZER in sharding.offloaded:
        parts[OPTIMIZER] = 0
        parts[WEIGHTS] -= _own_bytes(sizes.trained, sharding)
        if window == STEP or sharding.zero_stage != 1:
            parts[GRADIENTS] = 0
        if sharding.zero_stage != 3:  # gradients of earlier micro-steps come back through it
            parts[COMMUNICATION] += sizes.largest * FLOAT32
    if OFFLOAD_PARAM in sharding.offloaded:
        parts[WEIGHTS] -= _own_bytes(sizes.parameters, sharding)


def offloaded_memory(windows: Mapping[str, Mapping[str, int]], sharding: Sharding, sizes: ModelSizes) -> dict[str, int]:
    """Bytes by part of the host memory in which each process keeps what DeepSpeed offloads.

    In addition to the part that this process updates: in stages 1 and 2 a buffer in which it returns to the device, and
    one of the largest weight's size; gradients a second time in stage 3, and in stage 2 where micro-steps accumulate
    them, whole for each weight of which this process updates some elements.
    """
    own = _own_bytes(sizes.trained, sharding)
    parts = dict.fromkeys((WEIGHTS, OPTIMIZER, GRADIENTS), 0)
    if OFFLOAD_OPTIMIZER in sharding.offloaded:
        parts[OPTIMIZER] = max(-(-each.get(OPTIMIZER, 0) // sharding.processes) for each in windows.values())
        parts[GRADIENTS] = parts[WEIGHTS] = own
        if sharding.zero_stage == 3:
            parts[GRADIENTS] += own
        else:
            parts[WEIGHTS] += own
            parts[GRADIENTS] += sizes.largest * FLOAT32
        if sharding.zero_stage == 2 and sharding.micro_steps > 1:
            parts[GRADIENTS] += max(own, sizes.largest * FLOAT32)
    if OFFLOAD_PARAM in sharding.offloaded:
        parts[WEIGHTS] += _own_bytes(sizes.parameters, sharding)
    return {part: size for part, size in parts.items() if size}


def _apply_fully_shard(parts: dict[str, int], sharding: Sharding, sizes: ModelSizes, *, step: bool) -> None:
    """Changes `parts` to the bytes of a process under `fully_shard`: its part of everything, and, gathered while they
    are needed, the weights outside of blocks and of two blocks, the current and the next. Their gradients are whole
    until they are sent, those of 16 bits also as the float32 that is sent. Weights that are gathered in 16 bits have no
    copies of autocast."""
    outside = sizes.parameters - sizes.blocks
    current, both = sizes.largest_block, min(sizes.blocks, 2 * sizes.largest_block)
    buffers = max(0, parts.get(WEIGHTS, 0) - sizes.parameters * FLOAT32)
    gathered = 0 if step else outside * sharding.outside + both * sharding.gathered
    parts[WEIGHTS] = buffers + _own_bytes(sizes.parameters, sharding) + gathered
    parts[OPTIMIZER] = -(-parts.get(OPTIMIZER, 0) // sharding.processes)
    parts[GRADIENTS] = _own_bytes(sizes.trained, sharding)
    sent = FLOAT32 if sharding.gathered == sharding.outside else sharding.gathered + FLOAT32
    parts[COMMUNICATION] = 0 if step else outside * FLOAT32 + current * sent
    if sharding.gathered != FLOAT32:
        parts.pop(CAST_WEIGHTS, None)


def _apply_whole_tensors(parts: dict[str, int], sharding: Sharding, sizes: ModelSizes, *, step: bool) -> None:
    """Changes `parts`, in which a process has its equal part of the optimizer's state, to those of the process that
    owns most of what the optimizer sees whole; weights and gradients of that are whole during the optimizer step, and
    once more as they are sent and as they arrive."""
    if not sizes.seen_whole:
        return
    named = {f"{number:06d}": (elements,) for number, elements in enumerate(sizes.seen_whole)}
    owned = [0] * sharding.processes
    for name, owner in assign_owners(named, sharding.processes).items():
        owned[owner] += named[name][0]
    excess = max(owned) - -(-sum(owned) // sharding.processes)
    state = parts.get(OPTIMIZER, 0)
    parts[OPTIMIZER] = state + state * sharding.processes * excess // max(1, sizes.trained)
    if step:
        parts[COMMUNICATION] = parts.get(COMMUNICATION, 0) + 4 * max(owned) * FLOAT32


def _own_bytes(elements: int, sharding: Sharding) -> int:
    """Bytes of one process's part of `elements`."""
    return -(-elements // sharding.processes) * FLOAT32

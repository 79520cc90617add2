"""What each process keeps of a step's memory when an engine shares it: DDP, ZeRO as our DeepSpeed engine holds it, and
torch's `fully_shard`.

ZeRO's numbers are those of DeepSpeed's own sources: all of it float32, gradients reduced through one flat buffer that
is allocated whole, from the first gradient to the backward's end in stage 1 and 2, and copied once more to be sent.
Weights of these stages lie in a flat copy beside the part that this process updates; gradients are whole until then in
stage 1, and in the buffer as soon as they come in stage 2. In stage 3 a part lies there twice, small parameters are
whole everywhere, and the others while they are needed; what is gathered ahead arrives in one flat buffer, from which it
is copied.

What is offloaded is counted by `on_host`: the part that this process updates, its state, and its gradients, which are
sent there as they come, from the device's flat buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from terakoya.config.deepspeed import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from terakoya.estimation.fake_step import FORWARD, LATE_BACKWARD, STEP, ModelSizes
from terakoya.estimation.memory_tracker import GRADIENTS, OPTIMIZER, WEIGHTS

COMMUNICATION = "communication"
BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer for gradients (`reduce_bucket_size`, and stage 0's `MEMORY_OPT_ALLREDUCE_SIZE`); one
that holds all gradients is large enough."""
LIVE = 1_000_000_000
"""Elements that stage 3 gathers at most before it lets some go (`stage3_max_live_parameters`)."""
AHEAD = 50_000_000
"""Elements that stage 3 gathers ahead of their use (`stage3_prefetch_bucket_size`)."""
FLOAT32 = 4


@dataclass(frozen=True)
class Sharding:
    """How many processes share what.

    Attributes:
        processes: all of them.
        zero_stage: DeepSpeed's; None is another engine.
        micro_steps: of an optimizer step.
        cut: whether torch's `fully_shard` cuts the weights up; else it is DDP.
        offloaded: what ZeRO keeps on the host, of DeepSpeed's names.
    """

    processes: int
    zero_stage: int | None
    micro_steps: int
    cut: bool = False
    offloaded: Set[str] = frozenset()

    @property
    def gradients_stay(self) -> bool:
        """Whether whole gradients are there when a forward begins: those of an earlier micro-step, or, with DDP, the
        buckets that they always lie in."""
        if self.cut:
            return False
        if self.zero_stage is None:
            return self.processes > 1 or self.micro_steps > 1
        return self.micro_steps > 1 and self.zero_stage < 2


def memory_per_process(
    windows: Mapping[str, Mapping[str, int]], world: Sharding, held: ModelSizes
) -> dict[str, dict[str, int]]:
    """Bytes by part in each of `windows` (of a process that holds everything) in each process of `world`.

    `held` is what the model holds. DDP's buckets are the gradients' own memory.
    """
    result = {name: dict(parts) for name, parts in windows.items()}
    for name, parts in result.items():
        if world.cut:
            _cut(parts, world, held, step=name == STEP)
        elif world.zero_stage == 0:
            if world.processes > 1 and name == STEP:  # gradients are reduced after the backward
                parts[COMMUNICATION] = min(held.trained, BUCKET) * FLOAT32
        elif world.zero_stage is not None:
            _zero(parts, world, held, window=name)
            _without_host(parts, world, held, window=name)
    whole = held.trained * FLOAT32
    assert all(parts.get(GRADIENTS, 0) <= 2 * whole for parts in result.values())
    return result


def _zero(parts: dict[str, int], world: Sharding, held: ModelSizes, *, window: str) -> None:
    """Changes `parts` to what a process holds in DeepSpeed's stage 1, 2 or 3, in that `window` of a step."""
    mine = _share(held.trained, world)
    bucket = min(held.trained, BUCKET) * FLOAT32
    step = window == STEP
    parts[OPTIMIZER] = -(-parts.get(OPTIMIZER, 0) // world.processes)
    if world.zero_stage != 3:
        parts[WEIGHTS] = parts.get(WEIGHTS, 0) + mine
        parts[COMMUNICATION] = 0 if step or window == FORWARD else bucket
        if step:  # this process's gradients, and once more, flat
            parts[GRADIENTS] = 2 * mine
        elif world.zero_stage == 2:
            # those of earlier micro-steps, or of earlier buckets
            parts[GRADIENTS] = mine if world.micro_steps > 1 or held.trained > BUCKET else 0
            if window == LATE_BACKWARD:
                parts[COMMUNICATION] += bucket
        return
    parts[COMMUNICATION] = bucket
    parts[GRADIENTS] = mine
    others = max(0, parts.get(WEIGHTS, 0) - held.parameters * FLOAT32)  # buffers are not shared
    whole = held.small if step else min(held.parameters, max(LIVE, held.small))
    parts[WEIGHTS] = others + mine + _share(held.parameters, world) + whole * FLOAT32
    if not step:
        parts[COMMUNICATION] += min(held.parameters, AHEAD) * FLOAT32


def _without_host(parts: dict[str, int], world: Sharding, held: ModelSizes, *, window: str) -> None:
    """Takes away from `parts` what lies on the host: see `on_host`."""
    if OFFLOAD_OPTIMIZER in world.offloaded:
        parts[OPTIMIZER] = 0
        parts[WEIGHTS] -= _share(held.trained, world)
        if window == STEP or world.zero_stage != 1:
            parts[GRADIENTS] = 0
        if world.zero_stage != 3:  # those of earlier micro-steps come back through it
            parts[COMMUNICATION] += held.largest * FLOAT32
    if OFFLOAD_PARAM in world.offloaded:
        parts[WEIGHTS] -= _share(held.parameters, world)


def offloaded_memory(windows: Mapping[str, Mapping[str, int]], world: Sharding, held: ModelSizes) -> dict[str, int]:
    """Bytes by part of the host's memory in which each process of `world` keeps what DeepSpeed offloads.

    Beside the part that this process updates: in stage 1 and 2 a buffer in which it goes back to the device and one of
    the largest weight's size; gradients a second time in stage 3, and in stage 2 where micro-steps add them up, whole
    for each weight of which this process updates some.
    """
    mine = _share(held.trained, world)
    found = dict.fromkeys((WEIGHTS, OPTIMIZER, GRADIENTS), 0)
    if OFFLOAD_OPTIMIZER in world.offloaded:
        found[OPTIMIZER] = max(-(-parts.get(OPTIMIZER, 0) // world.processes) for parts in windows.values())
        found[GRADIENTS] = found[WEIGHTS] = mine
        if world.zero_stage == 3:
            found[GRADIENTS] += mine
        else:
            found[WEIGHTS] += mine
            found[GRADIENTS] += held.largest * FLOAT32
        if world.zero_stage == 2 and world.micro_steps > 1:
            found[GRADIENTS] += max(mine, held.largest * FLOAT32)
    if OFFLOAD_PARAM in world.offloaded:
        found[WEIGHTS] += _share(held.parameters, world)
    return {part: size for part, size in found.items() if size}


def _cut(parts: dict[str, int], world: Sharding, held: ModelSizes, *, step: bool) -> None:
    """Changes `parts` to what a process holds under `fully_shard`: a share of all, and whole while they are needed what
    is in no block and two blocks, the one that runs and the next; their gradients likewise until they are sent."""
    outside = held.parameters - held.blocks
    others = max(0, parts.get(WEIGHTS, 0) - held.parameters * FLOAT32)
    gathered = 0 if step else min(held.parameters, outside + 2 * held.largest_block) * FLOAT32
    parts[WEIGHTS] = others + _share(held.parameters, world) + gathered
    parts[OPTIMIZER] = -(-parts.get(OPTIMIZER, 0) // world.processes)
    parts[GRADIENTS] = _share(held.trained, world)
    parts[COMMUNICATION] = 0 if step else min(held.parameters, outside + held.largest_block) * FLOAT32


def _share(elements: int, world: Sharding) -> int:
    """Bytes of one process's part."""
    return -(-elements // world.processes) * FLOAT32

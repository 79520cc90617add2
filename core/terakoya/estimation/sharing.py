"""What each process keeps of a step's memory when an engine shares it: DDP and ZeRO, as our DeepSpeed engine holds it.

ZeRO's numbers are those of DeepSpeed's own sources: all of it float32, gradients reduced through one flat buffer that
is allocated whole, weights of stage 1 and 2 in a flat copy beside the part that this process updates, in stage 3 a part
twice and whole layers while they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terakoya.estimation.live_bytes import GRADIENTS, OPTIMIZER, WEIGHTS
from terakoya.estimation.simulation import STEP

COMMUNICATION = "communication"
BUCKET = 500_000_000
"""Elements of DeepSpeed's buffer for gradients (`reduce_bucket_size`, and stage 0's `MEMORY_OPT_ALLREDUCE_SIZE`)."""
LIVE = 1_000_000_000
"""Elements that stage 3 gathers at most before it lets some go (`stage3_max_live_parameters`)."""
FLOAT32 = 4


@dataclass(frozen=True)
class World:
    """How many processes share what.

    Attributes:
        processes: all of them.
        zero_stage: DeepSpeed's; None is DDP.
        micro_steps: of an optimizer step.
    """

    processes: int
    zero_stage: int | None
    micro_steps: int

    @property
    def gradients_stay(self) -> bool:
        """Whether whole gradients are there when a forward begins: those of an earlier micro-step, or, with DDP, the
        buckets that they always lie in."""
        if self.zero_stage is None:
            return self.processes > 1 or self.micro_steps > 1
        return self.micro_steps > 1 and self.zero_stage < 2


def shared(
    windows: Mapping[str, Mapping[str, int]], world: World, *, parameters: int, trained: int
) -> dict[str, dict[str, int]]:
    """Bytes by part in each of `windows` (of a process that holds everything) in each process of `world`.

    `parameters` and `trained` are numbers of elements. DDP's buckets are the gradients' own memory.
    """
    result = {name: dict(parts) for name, parts in windows.items()}
    stage, processes = world.zero_stage, world.processes
    if stage is None:
        return result
    mine, whole = -(-trained // processes) * FLOAT32, trained * FLOAT32
    for name, parts in result.items():
        if stage == 0:
            if processes > 1 and name == STEP:  # gradients are reduced after the backward
                parts[COMMUNICATION] = min(trained, BUCKET) * FLOAT32
            continue
        parts[COMMUNICATION] = BUCKET * FLOAT32 if name != STEP or stage == 3 else 0
        parts[OPTIMIZER] = -(-parts.get(OPTIMIZER, 0) // processes)
        if not (stage == 1 and world.micro_steps > 1):
            parts[GRADIENTS] = mine
        if stage < 3:
            parts[WEIGHTS] = parts.get(WEIGHTS, 0) + mine
            if name == STEP:  # this process's gradients once more, flat
                parts[GRADIENTS] = parts.get(GRADIENTS, 0) + mine
        else:
            others = parts.get(WEIGHTS, 0) - parameters * FLOAT32  # buffers are not shared
            gathered = 0 if name == STEP else min(parameters, LIVE) * FLOAT32
            parts[WEIGHTS] = max(0, others) + mine + -(-parameters // processes) * FLOAT32 + gathered
    assert all(parts.get(GRADIENTS, 0) <= 2 * whole for parts in result.values())
    return result

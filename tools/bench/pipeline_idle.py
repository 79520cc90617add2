"""How long the processes of a pipeline wait for each other, by the order of torch's schedules: a table.

    python tools/bench/pipeline_idle.py

Nothing is trained. A forward of a stage, its gradients of hidden states, and its gradients of weights take one unit
each, and sending takes none. On the first stage, whose hidden states nobody waits for, torch computes all gradients at
once. A share is the time in which a process waits, of all time until the last process is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

SIZES = ((2, 1, 8), (2, 2, 8), (4, 1, 8), (4, 2, 8), (4, 2, 16), (8, 2, 32))
"""Processes, stages of each, micro-batches of a step."""
UNITS = 3
"""Units of a stage's forward and backward."""


class NamedStage:
    """What torch asks of a stage before it puts actions in order."""

    has_backward = True

    def __init__(self, index: int, count: int, processes: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, count, processes
        self.group_rank = index % processes
        self.is_first, self.is_last = index == 0, index == count - 1
        self.submod = torch.nn.Identity()


def waiting(schedule: type[Any], processes: int, stages: int, micro_batches: int) -> float:
    """Returns the share of time in which a process waits."""
    count = processes * stages
    local = [NamedStage(number * processes, count, processes) for number in range(stages)]
    made = schedule(local, micro_batches, loss_fn=lambda loss, _: loss)
    orders = {rank: [each for each in actions if each is not None] for rank, actions in made.pipeline_order.items()}
    clocks, finished = dict.fromkeys(orders, 0), dict[tuple[int, str, int | None], int]()
    while any(orders.values()):
        for rank, actions in orders.items():
            while actions:
                stage, kind, number, _ = actions[0]
                needed = _needed(stage, kind.value, number, count)
                if not finished.keys() >= needed:
                    break
                clocks[rank] = max([clocks[rank], *(finished[each] for each in needed)]) + _units(stage, kind.value)
                finished[stage, "B" if kind.value == "I" else kind.value, number] = clocks[rank]
                actions.pop(0)
    return 1 - UNITS * stages * micro_batches / max(clocks.values())


def _needed(stage: int, kind: str, number: int | None, count: int) -> set[tuple[int, str, int | None]]:
    """The actions that must be finished before."""
    if kind == "F":
        return {(stage - 1, "F", number)} if stage else set()
    if kind == "W":
        return {(stage, "B", number)}
    return {(stage, "F", number), *([(stage + 1, "B", number)] if stage < count - 1 else [])}


def _units(stage: int, kind: str) -> int:
    """How long an action takes."""
    if kind == "I":
        return 0 if stage == 0 else 1
    return 2 if kind == "B" or (kind == "W" and stage == 0) else 1


def main() -> None:
    """Prints the table."""
    print("| processes | stages of each | micro-batches | 1F1B | zero bubble |\n|---|---|---|---|---|")
    for sizes in SIZES:
        shares = [waiting(each, *sizes) for each in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)]
        print("|", *(f"{size} |" for size in sizes), *(f"{100 * share:.0f}% |" for share in shares))


if __name__ == "__main__":
    main()

"""Norms of the optimizer's state: AdamW's `exp_avg` and `exp_avg_sq`, Muon's `momentum_buffer`, what others keep, and
the weights that it updates.

Every element counts once, on the process that would write it into a checkpoint. Squares are added up in float64, on the
device, so that the norms are those of one process with all tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from terakoya.components import EventListener, EventPlugin

if TYPE_CHECKING:
    from torch import Tensor

    from terakoya.components.run import Run, StepReport

RECORD = "optimizer_state"
STEP_COUNT = "step"
"""torch's name for how many steps a weight has taken."""


class OptimizerState(EventPlugin):
    """Logs the norm of each kind of optimizer state whenever the run logs: `exp_avg`, `exp_avg_sq`, `momentum_buffer`
    and the like, of all weights and of each parameter group; and that of the trained weights, `weight`."""

    def start(self, run: Run) -> EventListener:
        return _Listener()


class _Listener(EventListener):
    """Logs norms.

    Attributes:
        groups: the settings of each parameter group, by its number, as they were written.
    """

    def __init__(self) -> None:
        self.groups: list[str] = []

    def step_finished(self, run: Run, report: StepReport) -> None:
        if report.values is None:
            return
        import torch

        parts: defaultdict[str, list[Tensor]] = defaultdict(list)

        def add(name: str, value: Tensor) -> None:
            parts[name].append(torch.linalg.vector_norm(value, dtype=torch.float64).to(run.device))

        for shard in run.weight_shards():
            add("weight", shard.value)
        for group, shard in run.optimizer_shards():
            state = shard.name.rpartition("/")[2]
            if state != STEP_COUNT:
                add(f"{state}/{group}", shard.value)
        names = sorted(parts)
        own = torch.stack([torch.stack(parts[name]).square().sum() for name in names]).tolist() if names else []
        squares: defaultdict[str, float] = defaultdict(float)
        found = run.reduce(dict(zip(names, own, strict=True)))
        groups = sorted({name.partition("/")[2] for name in found if "/" in name})  # on each rank those of all
        for name, square in found.items():
            state, slash, group = name.partition("/")
            squares[state] += square
            if slash:
                squares[f"{state}/group{groups.index(group)}"] += square
        if groups != self.groups:
            self.groups = groups
            run.write("optimizer_groups", groups=groups)
        norms = {name: math.sqrt(square) for name, square in sorted(squares.items())}
        run.write(RECORD, **norms)
        run.write_numbers({f"optimizer/{name}": norm for name, norm in norms.items() if math.isfinite(norm)})

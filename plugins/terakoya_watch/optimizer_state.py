"""Norms of the optimizer's state: AdamW's `exp_avg` and `exp_avg_sq`, Muon's `momentum_buffer`, and what others keep.

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
    and the like, of all weights and of each parameter group."""

    def start(self, run: Run) -> EventListener:
        return _Listener()


class _Listener(EventListener):
    def step_finished(self, run: Run, report: StepReport) -> None:
        if report.values is None:
            return
        import torch

        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        for group, shard in run.optimizer_shards():
            state = shard.name.rpartition("/")[2]
            if state != STEP_COUNT:
                norm = torch.linalg.vector_norm(shard.value, dtype=torch.float64)
                parts[f"{state}/group{group}"].append(norm.to(run.device))
        names = sorted(parts)
        own = torch.stack([torch.stack(parts[name]).square().sum() for name in names]).tolist() if names else []
        squares = run.reduce(dict(zip(names, own, strict=True)))
        for name, square in list(squares.items()):
            state = name.partition("/")[0]
            squares[state] = squares.get(state, 0.0) + square
        norms = {name: math.sqrt(square) for name, square in sorted(squares.items())}
        run.write(RECORD, **norms)
        run.write_numbers({f"optimizer/{name}": norm for name, norm in norms.items() if math.isfinite(norm)})

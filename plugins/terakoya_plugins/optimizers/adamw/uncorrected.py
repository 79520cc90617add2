"""torch's AdamW without its bias correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LARGE_STEP = 1e8
"""A step count at which both corrections, 1 - beta ** step, are 1 in any precision; in float32, adding 1 to it has no
effect."""


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW with uncorrected moments: each parameter's step count starts, and stays, at `LARGE_STEP`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.full((), LARGE_STEP, device=parameter.device if group["fused"] else "cpu"),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }
        return super().step(closure)

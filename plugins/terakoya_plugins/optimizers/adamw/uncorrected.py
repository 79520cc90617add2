"""torch's AdamW, optionally without its bias correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

FAR = 1e8
"""A step count at which both corrections, 1 - beta ** step, are 1 in any precision; float32 adds 1 to it in vain."""


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW whose moments are used as they are: each parameter's step count starts, and stays, at `FAR`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; see `torch.optim.AdamW.step`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.tensor(FAR, device=parameter.device if group["fused"] else "cpu"),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }
        return super().step(closure)


def build(
    groups: Sequence[dict[str, Any]],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
    fused: bool,
) -> torch.optim.AdamW:
    """An AdamW over parameter `groups`, corrected or not."""
    kind = torch.optim.AdamW if bias_correction else UncorrectedAdamW
    return kind(list(groups), lr=learning_rate, betas=betas, eps=eps, fused=fused)

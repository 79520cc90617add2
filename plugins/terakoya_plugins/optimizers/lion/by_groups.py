"""lion-pytorch's Lion that can step when only some of its groups have gradients, as in ZeRO stage 3, and that skips a
step without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lion_pytorch.foreach import Lion
from torch import Tensor


class LionByGroups(Lion):
    """Skips groups in which no weight has a gradient: the torch functions of Lion need at least one tensor.
    `found_inf` is that of torch's fused optimizers."""

    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # torch's name for it

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self.param_groups
        self.param_groups = [group for group in groups if any(each.grad is not None for each in group["params"])]
        try:
            return super().step(closure) if self.found_inf is None else self._step_unless(self.found_inf > 0)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _step_unless(self, skip: Tensor) -> None:
        """Takes Lion's step, with factors that change nothing where `skip`, () bool, is true."""
        taken = (~skip).float()
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            for each in weights:
                self.state[each].setdefault("exp_avg", torch.zeros_like(each))
            momenta = [self.state[each]["exp_avg"] for each in weights]
            # where the step is skipped the momentum stands for the gradient, so that it stays as it is
            gradients = [
                torch.where(skip, momentum, each.grad) for momentum, each in zip(momenta, weights, strict=True)
            ]
            updates = torch._foreach_lerp(momenta, gradients, 1 - group["betas"][0])
            torch._foreach_sign_(updates)
            torch._foreach_mul_(updates, group["lr"] * taken)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * taken)
            torch._foreach_sub_(weights, updates)
            torch._foreach_lerp_(momenta, gradients, 1 - group["betas"][1])

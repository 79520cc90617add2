"""torch's Adafactor on a GPU: what torch reads from the device twice for each tensor stays there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class AdafactorWithoutWaiting(torch.optim.Adafactor):
    """torch's Adafactor, with its settings and state.

    Attributes:
        found_inf: () float32, 1 where the step must change nothing; None on a CPU, where torch's own step is taken. Set
            by who calls `step`, as for torch's fused optimizers.
    """

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # torch's name for it

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every weight that has a gradient."""
        if self.found_inf is None:
            return super().step(closure)
        assert closure is None, "terakoya computes gradients before"
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    _update(each, self._state_of(each), group, self.found_inf > 0)
        return None

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of `weight`, which has a gradient, on its device; new where there is none yet."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = weight.new_zeros((), dtype=torch.float32)
            if weight.ndim > 1:
                state["row_var"] = weight.new_zeros((*weight.shape[:-1], 1))
                state["col_var"] = weight.new_zeros((*weight.shape[:-2], 1, weight.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(weight)
        elif state["step"].device != weight.device:  # torch's own, or a checkpoint's
            state["step"] = state["step"].to(weight.device)
        return state


def _update(weight: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], skip: Tensor) -> None:
    """Takes a step of torch's Adafactor, with factors that change nothing where `skip`, () bool, is true."""
    assert weight.grad is not None
    learning_rate, taken = group["lr"], (~skip).float()
    smallest, smallest_scale = group["eps"]
    smallest = torch.finfo(weight.dtype).eps if smallest is None else smallest
    gradient = torch.where(skip, 0.0, weight.grad)
    step = state["step"].add_(taken).clamp(min=1.0)  # the first step may be skipped
    new = step ** group["beta2_decay"] * taken
    rate = step.rsqrt().clamp(max=learning_rate) * _root_mean_square(weight).clamp(min=smallest_scale)
    weight.mul_(1 - learning_rate * group["weight_decay"] * taken)
    if weight.ndim > 1:
        row, column, square = state["row_var"], state["col_var"], gradient.square()
        row.lerp_(square.mean(-1, keepdim=True), new)
        column.lerp_(square.mean(-2, keepdim=True), new)
        moment = row @ column / row.mean(-2, keepdim=True).clamp(min=smallest)
    else:
        moment = state["variance"].lerp_(gradient.square(), new)
    update = gradient * moment.clamp(min=smallest**2).rsqrt()
    weight.sub_(update * (rate * taken / (_root_mean_square(update) / group["d"]).clamp(min=1.0)))


def _root_mean_square(values: Tensor) -> Tensor:
    return values.norm(2) / values.numel() ** 0.5

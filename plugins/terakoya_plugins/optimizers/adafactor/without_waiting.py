"""torch's Adafactor on a GPU: what torch reads from the device twice for each tensor stays there, and all tensors of
one shape are updated at once, where one after another is too little work for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terakoya.toolkit.parameter_groups import of_one_shape

MOST_AT_ONCE = 1 << 24
"""Elements of the tensors that are stacked: a stack is copied several times."""


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
            for weights in of_one_shape(group["params"], MOST_AT_ONCE):
                _update(weights, [self._state_of(each) for each in weights], group, self.found_inf > 0)
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


def _update(
    weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any], skip: Tensor
) -> None:
    """Takes a step of torch's Adafactor for `weights`, n of one shape, with factors that change nothing where `skip`,
    () bool, is true."""
    learning_rate, taken = group["lr"], (~skip).float()
    smallest, smallest_scale = group["eps"]
    smallest = torch.finfo(weights[0].dtype).eps if smallest is None else smallest
    values, gradients = _stack(weights), _stack([each.grad for each in weights if each.grad is not None])
    state = {name: _stack([each[name] for each in states]) for name in states[0]}
    gradients = torch.where(skip, 0.0, gradients)
    one_each = (-1, *[1] * weights[0].ndim)
    step = state["step"].add_(taken).clamp(min=1.0).view(one_each)  # the first step may be skipped
    new = step ** group["beta2_decay"] * taken
    rate = step.rsqrt().clamp_(max=learning_rate) * _root_mean_squares(values).clamp_(min=smallest_scale)
    if group["weight_decay"]:
        values.mul_(1 - learning_rate * group["weight_decay"] * taken)
    if weights[0].ndim > 1:
        row, column = state["row_var"], state["col_var"]
        row.lerp_(_mean_squares(gradients, -1), new)
        column.lerp_(_mean_squares(gradients, -2), new)
        moment = row / row.mean(-2, keepdim=True).clamp_(min=smallest) * column
    else:
        moment = state["variance"].lerp_(gradients.square(), new).clone()
    update = moment.clamp_(min=smallest**2).rsqrt_().mul_(gradients)
    bound = (_root_mean_squares(update) / group["d"]).clamp_(min=1.0)
    values.sub_(update.mul_(rate * taken / bound))
    _put_back(weights, values)
    for name, each in state.items():
        _put_back([of_one[name] for of_one in states], each)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns `tensors`, n of one shape, as one tensor (n, ...): a view where there is one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _put_back(tensors: Sequence[Tensor], stack: Tensor) -> None:
    """Copies the values of `stack`, which `_stack` made of `tensors`, into them."""
    if len(tensors) > 1:
        torch._foreach_copy_(list(tensors), list(stack.unbind()))


def _mean_squares(values: Tensor, dimension: int) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dimension, keepdim=True).square_().div_(values.shape[dimension])


def _root_mean_squares(stack: Tensor) -> Tensor:
    """Returns the root mean square of each of the n tensors of `stack` (n, ...), as (n, 1, ...)."""
    rows = stack.reshape(len(stack), -1)
    return (torch.linalg.vector_norm(rows, dim=1) / rows.shape[1] ** 0.5).view(-1, *[1] * (stack.ndim - 1))

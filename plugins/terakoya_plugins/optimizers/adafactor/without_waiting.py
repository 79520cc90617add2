"""torch's Adafactor on a GPU: what torch reads from the device twice for each tensor stays there, and all tensors of
one shape are updated at once, where one after another is too little work for a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terakoya.toolkit.parameter_groups import of_one_shape

MOST_AT_ONCE = 1 << 24
"""Elements of the tensors that are stacked: a stack is copied several times."""
DIMENSIONS = {"row_var": -1, "col_var": -2, "variance": 0}
"""The states of torch's Adafactor that average squared gradients, and the dimension over which they are means of them;
`variance` has an average for each element."""


class AdafactorWithoutWaiting(torch.optim.Adafactor):
    """torch's Adafactor, with its settings and state. `found_inf` is that of torch's fused optimizers; None on a CPU,
    where torch's own step is taken."""

    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True  # torch's name for it

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.found_inf is None:
            return super().step(closure)
        assert closure is None, "terakoya computes gradients before"
        for group in self.param_groups:
            for stacks in _at_once(of_one_shape(group["params"], MOST_AT_ONCE)):
                states = [[self._state_of(each) for each in weights] for weights in stacks]
                _update(stacks, states, group, self.found_inf > 0)
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


def _at_once(stacks: Iterable[Sequence[Tensor]]) -> Iterator[list[Sequence[Tensor]]]:
    """Yields lists of `stacks`, of together at most MOST_AT_ONCE elements, or one stack."""
    found: list[Sequence[Tensor]] = []
    for stack in stacks:
        if found and sum(each.numel() for weights in (*found, stack) for each in weights) > MOST_AT_ONCE:
            yield found
            found = []
        found.append(stack)
    if found:
        yield found


def _update(
    stacks: Sequence[Sequence[Tensor]],
    states: Sequence[Sequence[Mapping[str, Tensor]]],
    group: Mapping[str, Any],
    skip: Tensor,
) -> None:
    """Takes a step of torch's Adafactor for the weights in `stacks`, each of one shape, with factors that change
    nothing where `skip`, () bool, is true. What can, takes the weights of all shapes at once."""
    learning_rate, taken = group["lr"], (~skip).float()
    smallest, smallest_scale = group["eps"]
    smallest = torch.finfo(stacks[0][0].dtype).eps if smallest is None else smallest
    weights = [each for stack in stacks for each in stack]
    steps = [state["step"] for of_stack in states for state in of_stack]

    def for_stacks(values: Tensor) -> list[Tensor]:
        parts = values.split([len(stack) for stack in stacks])
        return [part.view(-1, *[1] * stack[0].ndim) for part, stack in zip(parts, stacks, strict=True)]

    counted = torch.stack(steps).add_(taken)
    torch._foreach_copy_(steps, list(counted.unbind()))
    counted.clamp_(min=1.0)  # the first step may be skipped
    scales = _root_mean_squares(weights).clamp_(min=smallest_scale)
    rates = counted.rsqrt().clamp_(max=learning_rate) * scales * taken
    gradients = [_stack([each.grad for each in stack if each.grad is not None]) for stack in stacks]
    gradients = [torch.where(skip, 0.0, each) for each in gradients]
    shares = for_stacks(counted ** group["beta2_decay"] * taken)
    updates = _second_moments(gradients, states, shares, smallest)
    torch._foreach_clamp_min_(updates, smallest**2)
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, gradients)
    of_weights = [each for update in updates for each in update.unbind()]
    bounds = (_root_mean_squares(of_weights) / group["d"]).clamp_(min=1.0)
    for update, rate in zip(updates, for_stacks(rates / bounds), strict=True):
        update.mul_(rate)
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - learning_rate * group["weight_decay"] * taken)
    torch._foreach_sub_(weights, of_weights)


def _second_moments(
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Mapping[str, Tensor]]],
    shares: Sequence[Tensor],
    smallest: float,
) -> list[Tensor]:
    """Averages the squares of `gradients`, stacks (n, ...), into `states`, where new ones have `shares` (n, 1, ...).
    Returns what the averages say of each square, in the shapes of the gradients."""
    averages = [
        {name: _stack([each[name] for each in of_stack]) for name in DIMENSIONS if name in of_stack[0]}
        for of_stack in states
    ]
    squares = [
        each.abs() if name == "variance" else torch.linalg.vector_norm(each, dim=DIMENSIONS[name], keepdim=True)
        for each, of_stack in zip(gradients, averages, strict=True)
        for name in of_stack
    ]
    torch._foreach_mul_(squares, squares)
    sizes = [
        1 if name == "variance" else each.shape[DIMENSIONS[name]]
        for each, of_stack in zip(gradients, averages, strict=True)
        for name in of_stack
    ]
    torch._foreach_div_(squares, sizes)
    found, new = [], iter(squares)
    for of_stack, share, stack in zip(averages, shares, states, strict=True):
        for name, average in of_stack.items():
            average.lerp_(next(new), share)
            _put_back([each[name] for each in stack], average)
        if "variance" in of_stack:
            found.append(of_stack["variance"].clone())
        else:
            row = of_stack["row_var"]
            found.append(row / row.mean(-2, keepdim=True).clamp_(min=smallest) * of_stack["col_var"])
    return found


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns `tensors`, n of one shape, as one tensor (n, ...): a view where there is one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _put_back(tensors: Sequence[Tensor], stack: Tensor) -> None:
    """Copies the values of `stack`, which `_stack` made of `tensors`, into them."""
    if len(tensors) > 1:
        torch._foreach_copy_(list(tensors), list(stack.unbind()))


def _root_mean_squares(tensors: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(tensors))
    torch._foreach_div_(norms, [each.numel() ** 0.5 for each in tensors])
    return torch.stack(norms)

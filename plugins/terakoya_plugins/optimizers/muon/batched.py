"""torch's Muon with all matrices of one shape at once, since one matrix after another is too little work for a GPU's
kernel; in float32 where a device multiplies bf16 slowly, as most processors do; without waiting for the device where a
step must be skipped; and for matrices of either orientation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terakoya.toolkit.fast_products import multiplies_fast
from terakoya.toolkit.parameter_groups import of_one_shape

MOST_AT_ONCE = 1 << 26
"""Elements of the matrices that are stacked: a stack is copied several times."""
TRANSPOSED = "transposed"
"""The key of a group whose matrices are (inputs, outputs), where those of `nn.Linear` are (outputs, inputs)."""


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, with its settings and state. `found_inf` is that of torch's fused optimizers."""

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is None, "terakoya computes gradients before"
        for group in self.param_groups:
            step_by_shape(group, self.state, self.found_inf)
        return None


@torch.no_grad()
def step_by_shape(group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]], found_inf: Tensor | None) -> None:
    """Takes a step of torch's Muon with the settings of `group`, over stacks of matrices of one shape."""
    for matrices in of_one_shape(group["params"], MOST_AT_ONCE):
        _step_stack(matrices, group, state, found_inf)


def _step_stack(
    matrices: Sequence[Tensor],
    group: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    found_inf: Tensor | None,
) -> None:
    """Updates `matrices`, n of one shape (a, b). Where `found_inf` is 1, factors of 0 and 1 leave them as they are."""
    gradients = torch.stack([each.grad for each in matrices if each.grad is not None])
    taken: Tensor | float = 1.0
    if found_inf is not None:
        taken = 1.0 - found_inf
        gradients = torch.where(found_inf > 0, 0.0, gradients)
    buffers = []
    for each in matrices:
        if "momentum_buffer" not in state[each]:
            state[each]["momentum_buffer"] = torch.zeros_like(each)
        buffers.append(state[each]["momentum_buffer"])
    momentum = torch.stack(buffers).lerp_(gradients, (1 - group["momentum"]) * taken)
    torch._foreach_copy_(buffers, list(momentum.unbind()))
    update = gradients.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    direction = orthogonalize(update, group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
    outputs, inputs = reversed(matrices[0].shape) if group.get(TRANSPOSED) else matrices[0].shape
    size = math.sqrt(max(1, outputs / inputs))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        size = 0.2 * math.sqrt(max(outputs, inputs))
    weights = torch.stack(list(matrices)).mul_(1 - group["lr"] * group["weight_decay"] * taken)
    weights.sub_(direction * (group["lr"] * size * taken))
    torch._foreach_copy_(list(matrices), list(weights.unbind()))


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], *, steps: int, eps: float) -> Tensor:
    """Returns nearly orthogonal matrices in the directions of `matrices` (n, a, b), float32, by Newton-Schulz
    iterations over products of whole stacks, in bf16 where the device multiplies it fast, otherwise in float32."""
    first, second, third = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    each = matrices.bfloat16() if multiplies_fast("bf16", matrices.device) else matrices
    each = each.mT if tall else each
    each = each / each.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        square = each @ each.mT
        polynomial = torch.baddbmm(square, square, square, beta=second, alpha=third)
        each = torch.baddbmm(each, polynomial, each, beta=first)
    return (each.mT if tall else each).float()

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
NEURON_BETA, CAUTIOUS = "neuron_beta", "cautious_weight_decay"
"""The keys of a group for `Muon`'s settings of these names."""
NEURON_SQUARES = "neuron_squares"
"""The state (outputs, 1), or (1, inputs) transposed, of NorMuon."""
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
    if group.get(NEURON_BETA) is not None:
        direction = _normalize_neurons(direction, matrices, group, state, taken)
    outputs, inputs = reversed(matrices[0].shape) if group.get(TRANSPOSED) else matrices[0].shape
    size = math.sqrt(max(1, outputs / inputs))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        size = 0.2 * math.sqrt(max(outputs, inputs))
    weights = torch.stack(list(matrices))
    decay: Tensor | float = group["lr"] * group["weight_decay"] * taken
    if group.get(CAUTIOUS):
        decay = decay * (direction * weights > 0)
    weights.mul_(1 - decay).sub_(direction * (group["lr"] * size * taken))
    torch._foreach_copy_(list(matrices), list(weights.unbind()))


def _normalize_neurons(
    direction: Tensor,
    matrices: Sequence[Tensor],
    group: Mapping[str, Any],
    state: Mapping[Tensor, dict[str, Any]],
    taken: Tensor | float,
) -> Tensor:
    """Returns `direction` (n, a, b) divided by the root of each neuron's mean square over the steps, as large as before
    (NorMuon: Li et al., 2025, arXiv:2510.05491)."""
    inputs = -2 if group.get(TRANSPOSED) else -1
    squares = direction.square().mean(dim=inputs, keepdim=True)
    for each, square in zip(matrices, squares, strict=True):
        if NEURON_SQUARES not in state[each]:
            state[each][NEURON_SQUARES] = torch.zeros_like(square)
    buffers = [state[each][NEURON_SQUARES] for each in matrices]
    second = torch.stack(buffers).lerp_(squares, (1 - group[NEURON_BETA]) * taken)
    torch._foreach_copy_(buffers, list(second.unbind()))
    normalized = direction / second.sqrt().add_(group["eps"])
    norms = [each.norm(dim=(1, 2), keepdim=True) for each in (direction, normalized)]
    return normalized * (norms[0] / norms[1].clamp_(min=group["eps"]))


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

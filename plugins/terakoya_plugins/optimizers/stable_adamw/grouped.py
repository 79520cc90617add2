"""The kernels of StableAdamW as operations of torch, which tensors without data know, too.

Letters in shapes: T tensors, P pieces of tensors, as the kernels divide them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terakoya.toolkit.torch_operations import operation


def update(
    tensors: Sequence[list[Tensor]], found_inf: Tensor | None, *, lr: float, betas: tuple[float, float],
    weight_decay: float, eps: float,
) -> None:  # fmt: skip
    """Takes a step of StableAdamW, which changes nothing where `found_inf` () is 1.

    Args:
        tensors: weights, gradients, first and second moments, and steps () of as many tensors, float32 and contiguous.
    """
    weights, gradients, first, second, steps = tensors
    sums = stable_adamw_sums(gradients, second, steps, betas[1], eps)
    rates = stable_adamw_rates_(sums, steps, gradients, found_inf, lr)
    numbers = [number for beta in betas for number in (beta, 1.0 - beta, _log(beta))]
    stable_adamw_update_(weights, [*first, *second], gradients, steps, rates, found_inf, [*numbers, weight_decay, eps])


@operation(lambda gradients, *further: gradients[0].new_empty(1))
def stable_adamw_sums(
    gradients: list[Tensor], second: list[Tensor], steps: list[Tensor], beta: float, eps: float
) -> Tensor:
    """Returns the sums (P,) of gradient ** 2 / second moment, over pieces of tensors."""
    from terakoya_plugins.optimizers.stable_adamw import kernels

    sizes, pieces, _ = _layout(tuple(map(Tensor.numel, gradients)), gradients[0].device)
    sums = gradients[0].new_empty(pieces.shape[1])
    addresses = _addresses([gradients, second, steps])
    kernels.square_sums(addresses, pieces, sizes, sums, beta, 1.0 - beta, _log(beta), eps**2)
    return sums


@operation(lambda sums, steps, *further: sums.new_empty(len(steps)), changes=("steps",))
def stable_adamw_rates_(
    sums: Tensor, steps: list[Tensor], gradients: list[Tensor], found_inf: Tensor | None, learning_rate: float
) -> Tensor:
    """Returns the learning rate (T,) of each of the `gradients`, and adds 1 to its step."""
    from terakoya_plugins.optimizers.stable_adamw import kernels

    sizes, _, bounds = _layout(tuple(map(Tensor.numel, gradients)), sums.device)
    rates = sums.new_empty(len(steps))
    kernels.rates(sums, _addresses([steps])[0], sizes, bounds, found_inf, learning_rate, rates)
    return rates


@operation(lambda *_: None, changes=("weights", "moments"))
def stable_adamw_update_(
    weights: list[Tensor], moments: list[Tensor], gradients: list[Tensor], steps: list[Tensor], rates: Tensor,
    found_inf: Tensor | None, numbers: list[float],
) -> None:  # fmt: skip
    """Takes AdamW's step with the learning rates (T,). `moments` are the first ones, then the second; `numbers` are
    those of `kernels.update`."""
    from terakoya_plugins.optimizers.stable_adamw import kernels

    sizes, pieces, _ = _layout(tuple(map(Tensor.numel, weights)), rates.device)
    first, second = moments[: len(weights)], moments[len(weights) :]
    kernels.update(_addresses([weights, gradients, first, second, steps]), pieces, sizes, found_inf, rates, *numbers)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _addresses(tensors: Sequence[list[Tensor]]) -> Tensor:
    host = torch.tensor([[each.data_ptr() for each in row] for row in tensors], dtype=torch.int64)
    device = tensors[0][0].device
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@functools.lru_cache(maxsize=64)
def _layout(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `sizes` (T,) int64, the tensor of each piece and its number there (2, P) int32, and the first piece of
    each tensor and the end (T + 1,) int32, on `device`."""
    from terakoya_plugins.optimizers.stable_adamw.kernels import PIECE

    counts = torch.tensor([-(-each // PIECE) for each in sizes])
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owners = torch.arange(len(sizes)).repeat_interleave(counts)
    pieces = torch.stack([owners, torch.arange(len(owners)) - bounds[owners]])
    return torch.tensor(sizes).to(device), pieces.int().to(device), bounds.int().to(device)

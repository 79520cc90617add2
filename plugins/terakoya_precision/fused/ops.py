"""The fused kernels as operations of torch, which its compiler and tensors without data know, too.

Where the kernels are imported, Triton must be; the operations themselves can be named without it.

Letters in shapes: N rows, H width, C columns, P groups of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terakoya.toolkit.torch_operations import operation

NORM_GROUPS, COLUMN_GROUPS = 256, 64
"""Groups of rows, at most: about two programs for each multiprocessor of a large GPU."""
LARGEST_WIDTH = 4096
"""The widest rows of which a program holds what it needs in registers."""


def draw_seed(device: torch.device) -> Tensor:
    """Returns a seed (1,) of dropout from torch's generator of `device`, for which the host does not wait."""
    return torch.randint(2**62, (1,), device=device)


@operation(lambda states, *further: _like_sum_norm(states))
def sum_norm(
    states: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, dropout: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the layer norm of the sum of `residual` (N, H) and what dropout leaves of `states` (N, H), that sum, and
    the mean and the reciprocal standard deviation (N,) float32 of its rows. Without a `seed` nothing is dropped."""
    from terakoya_precision.fused import norm_kernels

    results = _like_sum_norm(states)
    given = tuple(each.contiguous() for each in (states, residual, weight, bias))
    norm_kernels.sum_norm(given, seed, dropout, eps, results)
    return results


def _like_sum_norm(states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = states.new_empty(len(states), dtype=torch.float32)
    return states.new_empty(states.shape), states.new_empty(states.shape), row, torch.empty_like(row)


@operation(lambda gradient, total, mean, deviation, weight, seed, dropout: _like_sum_norm_backward(total, seed))
def sum_norm_backward(
    gradient: Tensor, total: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, seed: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of the `total` and of the states (N, H), the second without elements where nothing was
    dropped and both are the same; and (P, 3, H) float32, whose sums over P are the gradients of the norm's weight and
    bias and the sum over rows of the states' gradient."""
    from terakoya_precision.fused import norm_kernels

    results = _like_sum_norm_backward(total, seed)
    given = tuple(each.contiguous() for each in (gradient, total, mean, deviation, weight))
    norm_kernels.sum_norm_backward(given, seed, dropout, results)
    return results


def _like_sum_norm_backward(total: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    count, width = total.shape
    of_states = total.new_empty((0, width) if seed is None else (count, width))
    return total.new_empty(total.shape), of_states, _sums(total, NORM_GROUPS, 4, 3, width)


@operation(lambda gradient, states, approximate: _like_gelu_backward(states))
def gelu_backward(gradient: Tensor, states: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Returns the gradient (N, C) of the `states` (N, C) before GELU, and (P, C) float32, whose sum over P is its sum
    over rows. `approximate` is "none" or "tanh"."""
    from terakoya_precision.fused import column_kernels

    of_states, sums = _like_gelu_backward(states)
    column_kernels.gelu_backward(gradient.contiguous(), states.contiguous(), approximate, of_states, sums)
    return of_states, sums


def _like_gelu_backward(states: Tensor) -> tuple[Tensor, Tensor]:
    return states.new_empty(states.shape), _sums(states, COLUMN_GROUPS, 16, states.shape[1])


@operation(lambda first, second, third: _like_join(first))
def join(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    """Returns three matrices (N, C) side by side (N, 3C), and (P, 3C) float32, whose sum over P is that over rows."""
    from terakoya_precision.fused import column_kernels

    joined, sums = _like_join(first)
    matrices = [each if each.stride(1) == 1 else each.contiguous() for each in (first, second, third)]
    column_kernels.join(matrices, joined, sums)
    return joined, sums


def _like_join(first: Tensor) -> tuple[Tensor, Tensor]:
    count, width = first.shape
    return first.new_empty(count, 3 * width), _sums(first, COLUMN_GROUPS, 16, 3 * width)


@operation(lambda parts: parts.new_empty(parts.shape[1:]))
def column_sums(parts: Tensor) -> Tensor:
    """Returns the sum over P of `parts` (P, ...) float32."""
    from terakoya_precision.fused import column_kernels

    flat = parts.reshape(len(parts), -1)
    sums = flat.new_empty(flat.shape[1])
    column_kernels.column_sums(flat, sums)
    return sums.view(parts.shape[1:])


@operation(lambda total, left, right: None, changes=("total",))
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of `left` (N, C) and `right` (C, H) to `total` (N, H). Of `addmm_` torch's compiler makes
    an operation that copies `total` first."""
    total.addmm_(left, right)


def _sums(rows: Tensor, groups: int, least: int, *shape: int) -> Tensor:
    """Returns a tensor for the sums of the groups of `rows` (N, ...), each of `least` rows or more."""
    return rows.new_empty(min(groups, -(-len(rows) // least)), *shape, dtype=torch.float32)

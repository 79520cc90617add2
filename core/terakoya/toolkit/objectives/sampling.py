"""Sampling one class for each row of weights, from one uniform number a row, by the inverse distribution function.

The method is exact. So is the largest of logits plus Gumbel noise, but that takes a random number for each class: with
32,768 classes the noise alone would cost more than the layers that compute the logits. Here the sums of blocks of
classes are searched first, then the classes of one block, in float64. Classes with a probability below 1e-7, which
float32 noise (or a cumulative sum in float32) never samples, are sampled with their correct frequency, and the cost is
one pass over the weights.

Letters: N rows, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terakoya.toolkit.objectives.columns import VocabularyPart

BLOCK = 128
"""Classes of one block: near the square root of a common vocabulary size."""


def draw(weights: Tensor, uniform: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Returns class numbers (N,) int64, sampled in proportion to `weights` (N, C), which are not negative; each row has
    a positive one.

    `uniform` (N,) float64, in [0, 1 - 2**-52], are the random numbers: equal weights and numbers give equal classes,
    independent of other rows. With a `part` the weights are those of its classes: the processes that divide the classes
    choose one of them by its sum of weights, which samples among its own, so that all return the same numbers.
    """
    if part is not None:
        return _draw_among_parts(weights, uniform, part)
    classes = weights.shape[1]
    whole = classes // BLOCK * BLOCK
    blocks = weights[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(-1)
    if whole < classes:
        blocks = torch.cat([blocks, weights[:, whole:].sum(-1, keepdim=True)], 1)
    block, share = _locate(blocks, uniform[:, None])
    inside = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    of_block = weights.gather(1, inside.clamp(max=classes - 1)).masked_fill(inside >= classes, 0.0)
    number, _ = _locate(of_block, share.clamp(0.0, 1.0 - 2.0**-52))
    return (block * BLOCK + number).clamp(max=classes - 1)[:, 0]


def _draw_among_parts(weights: Tensor, uniform: Tensor, part: VocabularyPart) -> Tensor:
    sums = weights.new_zeros(len(weights), part.group.size, dtype=torch.float64)
    sums[:, part.group.index] = weights.sum(-1, dtype=torch.float64)
    chosen, share = _locate(part.group.all_reduce(sums), uniform[:, None])
    number = part.first + draw(weights, share[:, 0].clamp(0.0, 1.0 - 2.0**-52))
    return part.group.all_reduce(number * (chosen[:, 0] == part.group.index))


def _locate(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first column (N, 1) whose cumulative sum exceeds `uniform` (N, 1) times the sum of `weights` (N, M),
    and the position of that point within the column's own weight, (N, 1) in [0, 1)."""
    wide = weights.double()
    running = triangle_sums(wide) if wide.device.type == "cuda" else wide.cumsum(1)
    target = uniform * running[:, -1:]
    column = (running <= target).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    own = weights.gather(1, column).double()
    return column, (target - (running.gather(1, column) - own)) / own


def triangle_sums(values: Tensor) -> Tensor:
    """Returns the cumulative sums of `values` (N, M) over columns as one product, the same bits each time; on a GPU
    torch calls none of its own cumulative sums deterministic."""
    columns = values.shape[1]
    return values @ values.new_ones(columns, columns).triu()

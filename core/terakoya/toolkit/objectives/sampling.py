"""Drawing one class for each row of weights, from one uniform number a row: the inverse of the distribution function.

Exact, as drawing by the largest of logits plus Gumbel noise is, which takes a number of its own for each class: with
32,768 classes the noise alone would cost more than the layers that made the logits. Sums of blocks of classes are
looked through first, then the classes of one block, in float64: so classes of less than 1e-7, which float32 noise (or a
running sum in float32) never draws, are drawn as often as they should be, and the cost is one pass over the weights.

Letters: N rows, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Classes of one block: near the square root of a usual vocabulary."""


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Class numbers (N,) int64, drawn in proportion to `weights` (N, C), not negative, each row with a positive one.

    `uniform` (N,) float64, in [0, 1 - 2**-52], decides: equal weights and numbers give equal classes, whatever the
    other rows hold.
    """
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


def _locate(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first column (N, 1) whose running sum exceeds `uniform` (N, 1) times the sum of `weights` (N, M), and how far
    inside its own weight that lies, (N, 1) in [0, 1)."""
    running = weights.double().cumsum(1)
    target = uniform * running[:, -1:]
    column = (running <= target).sum(1, keepdim=True).clamp(max=weights.shape[1] - 1)
    own = weights.gather(1, column).double()
    return column, (target - (running.gather(1, column) - own)) / own

"""A loss over parts of the positions whose gradients are formed in the forward, while a part's logits are there.

Recomputing a part in the backward would run the vocabulary head's product a second time. A sum's gradient is known up
to one factor, which the backward multiplies in.

Letters: n positions of a part, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Score = Callable[[Tensor, Tensor], Tensor]
"""Returns the summed loss, a scalar, of hidden states (n, H) with labels (n,)."""


def sum_with_gradients(score: Score, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Returns the sum of `score` over `parts`, hidden states and labels, a scalar; None where a weight of the head is
    there only while its module runs, as in ZeRO's third stage, so that no gradient of it can be kept.

    Gradients of hidden states and of all weights that `score` uses are formed now.
    """
    weights: list[Tensor] = []
    sums: list[Tensor] = []
    of_hidden: list[Tensor] = []
    of_weights: list[Tensor | None] = []
    for hidden, labels in parts:
        with torch.enable_grad():
            own = hidden.detach().requires_grad_()
            total = score(own, labels)
        if not sums:
            weights = [each for each in _leaves(total) if each is not own]
            if any(hasattr(each, "ds_id") for each in weights):  # ZeRO's mark of a partitioned weight
                return None
            of_weights = [None] * len(weights)
        gradient, *further = torch.autograd.grad(total, [own, *weights])
        of_weights = [
            new if before is None else before.add_(new) for before, new in zip(of_weights, further, strict=True)
        ]
        of_hidden.append(gradient)
        sums.append(total.detach())
    known = [*of_hidden, *(each for each in of_weights if each is not None)]
    loss: Tensor = _KnownGradients.apply(torch.stack(sums).sum(), known, *(hidden for hidden, _ in parts), *weights)
    return loss


def _leaves(total: Tensor) -> list[Tensor]:
    """Returns the leaves that require a gradient, from which autograd knows that `total` was computed."""
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting += [before for before, _ in node.next_functions]
    return list(found.values())


class _KnownGradients(torch.autograd.Function):
    """A scalar with the gradients `known` for the tensors that follow it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, known: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.known = known
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.known is None:
            raise RuntimeError("the gradients of a loss in parts were formed once, and are gone after a backward")
        known, ctx.known = ctx.known, None
        return (None, None, *(each.mul_(factor) for each in known))

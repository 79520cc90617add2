"""Summed cross entropy that needs no memory of its own.

`torch.nn.functional.cross_entropy` keeps the log probabilities and allocates a gradient in addition to the logits:
three arrays of rows x vocabulary. Here the forward overwrites the logits with exponentials, and the backward overwrites
those with the gradient: one array. Logits in bf16 or fp16 stay in that precision, see `low_precision_entropy`.

Letters: N rows, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terakoya.toolkit.objectives import low_precision_entropy

IGNORED = -100
"""The label of a row that is ignored."""


def summed_cross_entropy_(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the summed cross entropy of `logits` (N, C) against `labels` (N,) int64, -100 ignored: a float32 scalar,
    or float64 for float64 logits. As in torch, any other label outside [0, C) is an error.

    Where logits require a gradient, they are overwritten, and the backward can run once. It raises RuntimeError if the
    operation that computed the logits needs them for its own backward.
    """
    if logits.dtype in low_precision_entropy.DTYPES and torch.is_grad_enabled() and logits.requires_grad:
        return low_precision_entropy.summed(logits, labels)[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    loss, _ = _SummedCrossEntropy.apply(logits, labels)
    return loss


def summed_cross_entropy_and_odds_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `summed_cross_entropy_`, and its exponentials (N, C): each row's softmax, scaled so that its largest is
    1. They have no gradient and must be read before the backward, which overwrites them."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        odds = (logits - logits.amax(1, keepdim=True)).exp_()
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), odds
    loss, odds = _SummedCrossEntropy.apply(logits, labels)
    return loss, odds.detach()


def summed_cross_entropy_and_z_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `summed_cross_entropy_`, and the sum of log^2 Z over the rows that are not ignored, where Z is the sum of
    a row's exponentials. This term keeps logits from drifting (PaLM, Chowdhery et al., 2022, arXiv:2204.02311, section
    5).
    """
    if logits.dtype in low_precision_entropy.DTYPES and torch.is_grad_enabled() and logits.requires_grad:
        return low_precision_entropy.summed(logits, labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return loss, (logits.logsumexp(1) * (labels != IGNORED)).square().sum()
    loss, z, _ = _SummedCrossEntropyAndZ.apply(logits, labels)
    return loss, z


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        used = (labels != IGNORED)[:, None]
        labels = labels[:, None].masked_fill(~used, 0)  # another negative label is an error of `gather`
        largest = logits.amax(1, keepdim=True)
        of_labels = logits.gather(1, labels) - largest
        exponentials = logits.sub_(largest).exp_()
        total = exponentials.sum(1, keepdim=True)
        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(exponentials, total, labels, used)
        return (total.log() - of_labels).mul_(used).sum(), logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        exponentials, total, labels, used = ctx.saved_tensors
        if gradient is None:
            return None, None
        share = gradient * used
        return exponentials.mul_(share / total).scatter_add_(1, labels, -share), None


class _SummedCrossEntropyAndZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        used = (labels != IGNORED)[:, None]
        labels = labels[:, None].masked_fill(~used, 0)  # another negative label is an error of `gather`
        largest = logits.amax(1, keepdim=True)
        of_labels = logits.gather(1, labels) - largest
        exponentials = logits.sub_(largest).exp_()
        total = exponentials.sum(1, keepdim=True)
        log_total = total.log()
        log_z = log_total + largest
        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(exponentials, total, labels, used, log_z)
        return (log_total - of_labels).mul_(used).sum(), log_z.square().mul_(used).sum(), logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor | None, of_z: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        exponentials, total, labels, used, log_z = ctx.saved_tensors
        if of_loss is None and of_z is None:
            return None, None
        share = (0.0 if of_loss is None else of_loss) * used
        both = share + (0.0 if of_z is None else 2 * of_z * log_z) * used
        return exponentials.mul_(both / total).scatter_add_(1, labels, -share.to(total.dtype)), None

"""Summed cross entropy that needs no memory of its own.

`torch.nn.functional.cross_entropy` keeps the log probabilities and allocates a gradient in addition to the logits:
three arrays of rows x vocabulary. Here the forward overwrites the logits with exponentials, and the backward overwrites
those with the gradient: one array. Logits in bf16 or fp16 stay in that precision, see `low_precision_entropy`.

Logits of a padded head have further columns, which count nothing and get a gradient of 0 here: a slice of the logits
before would cost another array in the backward.

Letters: N rows, C classes, W columns: C or more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terakoya.toolkit.objectives import low_precision_entropy

IGNORED = -100
"""The label of a row that is ignored."""


def summed_cross_entropy_(logits: Tensor, labels: Tensor, classes: int | None = None) -> Tensor:
    """Returns the summed cross entropy of `logits` (N, W) against `labels` (N,) int64, -100 ignored: a float32 scalar,
    or float64 for float64 logits. C is `classes`, or W without it. As in torch, any other label outside [0, C) is an
    error.

    Where logits require a gradient, they are overwritten, and the backward can run once. It raises RuntimeError if the
    operation that computed the logits needs them for its own backward.
    """
    if logits.dtype in low_precision_entropy.DTYPES and torch.is_grad_enabled() and logits.requires_grad:
        return low_precision_entropy.summed_cross_entropy(logits, labels, classes)[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        logits = _without_padding(logits, classes)
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    loss, _ = _SummedCrossEntropy.apply(logits, labels, classes)
    return loss


def summed_cross_entropy_and_odds_(logits: Tensor, labels: Tensor, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `summed_cross_entropy_`, and its exponentials (N, C): each row's softmax, scaled so that its largest is
    1. They have no gradient and must be read before the backward, which overwrites them."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        logits = _without_padding(logits, classes)
        odds = (logits - logits.amax(1, keepdim=True)).exp_()
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), odds
    loss, odds = _SummedCrossEntropy.apply(logits, labels, classes)
    return loss, _without_padding(odds.detach(), classes)


def summed_cross_entropy_and_z_(logits: Tensor, labels: Tensor, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `summed_cross_entropy_`, and the sum of log^2 Z over the rows that are not ignored, where Z is the sum of
    a row's exponentials. This term keeps logits from drifting (PaLM, Chowdhery et al., 2022, arXiv:2204.02311, section
    5).
    """
    if logits.dtype in low_precision_entropy.DTYPES and torch.is_grad_enabled() and logits.requires_grad:
        return low_precision_entropy.summed_cross_entropy(logits, labels, classes)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        logits = _without_padding(logits, classes)
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return loss, (logits.logsumexp(1) * (labels != IGNORED)).square().sum()
    loss, z, _ = _SummedCrossEntropyAndZ.apply(logits, labels, classes)
    return loss, z


def _without_padding(logits: Tensor, classes: int | None) -> Tensor:
    return logits if classes is None else logits[:, :classes]


def _exponentiate(logits: Tensor, labels: Tensor, classes: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Writes exponentials over `logits` (N, C), of which those of each row's largest are 1 and those of padding 0.

    Returns, each (N, 1): whether a row's label counts, its label or 0, its largest logit, its label's logit less the
    largest, and the sum of its exponentials.
    """
    used = (labels != IGNORED)[:, None]
    labels = labels[:, None].masked_fill(~used, 0)  # another negative label is an error of `gather`
    own = _without_padding(logits, classes)
    largest = own.amax(1, keepdim=True)
    of_labels = own.gather(1, labels) - largest
    own.sub_(largest).exp_()
    total = own.sum(1, keepdim=True)
    if classes is not None:
        logits[:, classes:].zero_()
    return used, labels, largest, of_labels, total


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, classes: int | None) -> tuple[Tensor, Tensor]:
        used, labels, _, of_labels, total = _exponentiate(logits, labels, classes)
        ctx.classes = classes
        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, total, labels, used)
        return (total.log() - of_labels).mul_(used).sum(), logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
        logits, total, labels, used = ctx.saved_tensors
        if gradient is None:
            return None, None, None
        share = gradient * used
        _without_padding(logits, ctx.classes).mul_(share / total).scatter_add_(1, labels, -share)
        return logits, None, None


class _SummedCrossEntropyAndZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, classes: int | None) -> tuple[Tensor, Tensor, Tensor]:
        used, labels, largest, of_labels, total = _exponentiate(logits, labels, classes)
        ctx.classes = classes
        log_total = total.log()
        log_z = log_total + largest
        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, total, labels, used, log_z)
        return (log_total - of_labels).mul_(used).sum(), log_z.square().mul_(used).sum(), logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor | None, of_z: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
        logits, total, labels, used, log_z = ctx.saved_tensors
        if of_loss is None and of_z is None:
            return None, None, None
        share = (0.0 if of_loss is None else of_loss) * used
        both = share + (0.0 if of_z is None else 2 * of_z * log_z) * used
        _without_padding(logits, ctx.classes).mul_(both / total).scatter_add_(1, labels, -share.to(total.dtype))
        return logits, None, None

"""Summed cross entropy that needs no memory of its own.

`torch.nn.functional.cross_entropy` keeps the log probabilities and allocates a gradient in addition to the logits:
three arrays of rows x vocabulary. Here the forward overwrites the logits with exponentials, and the backward overwrites
those with the gradient: one array. Logits in bf16 or fp16 stay in that precision, see `_low_precision_entropy`.

Logits of a padded head have further columns, which count nothing and get a gradient of 0 here: a slice of the logits
before would cost another array in the backward. Of a vocabulary that processes divide, each has the logits of its own
part; they exchange three numbers a row: the largest logit, the label's, and the sum of exponentials.

Letters: N rows, C classes, W columns: C or more, or those of this process's part of the classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terakoya.toolkit.objectives import _low_precision_entropy
from terakoya.toolkit.objectives.columns import Columns, without_padding

IGNORED = -100
"""The label of a row that is ignored."""


def summed_cross_entropy_(logits: Tensor, labels: Tensor, columns: Columns | None = None) -> Tensor:
    """Returns the summed cross entropy of `logits` (N, W) against `labels` (N,) int64, -100 ignored: a float32 scalar,
    or float64 for float64 logits. `columns` say what the columns are; without them they are all C classes. As in torch,
    any other label outside [0, C) is an error.

    Where logits require a gradient, they are overwritten, and the backward can run once. It raises RuntimeError if the
    operation that computed the logits needs them for its own backward.
    """
    if logits.dtype in _low_precision_entropy.DTYPES and torch.is_grad_enabled() and logits.requires_grad:
        return _low_precision_entropy.summed_cross_entropy(logits, labels, columns)[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return _without_gradient(logits, labels, columns)
    loss, _, _ = _Summed.apply(logits, labels, columns)
    return loss


def summed_cross_entropy_and_odds_(
    logits: Tensor, labels: Tensor, columns: Columns | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `summed_cross_entropy_`, and its exponentials (N, C): each row's softmax, scaled so that its largest is
    1; of a divided vocabulary those of this process's part. They have no gradient and must be read before the backward,
    which overwrites them."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        own = without_padding(logits, columns)
        odds = (own - _largest(own, columns)).exp_()
        return _without_gradient(logits, labels, columns), odds
    loss, _, odds = _Summed.apply(logits, labels, columns)
    return loss, without_padding(odds.detach(), columns)


def summed_cross_entropy_and_z_(
    logits: Tensor, labels: Tensor, columns: Columns | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `summed_cross_entropy_`, and the sum of log^2 Z over the rows that are not ignored, where Z is the sum of
    a row's exponentials. This term keeps logits from drifting (PaLM, Chowdhery et al., 2022, arXiv:2204.02311, section
    5).
    """
    if logits.dtype in _low_precision_entropy.DTYPES and torch.is_grad_enabled() and logits.requires_grad:
        return _low_precision_entropy.summed_cross_entropy(logits, labels, columns)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not (torch.is_grad_enabled() and logits.requires_grad):
        loss, own = _without_gradient(logits, labels, columns), without_padding(logits, columns)
        if columns is None or columns.part is None:
            log_z = own.logsumexp(1)
        else:
            largest = _largest(own, columns)
            log_z = (columns.part.group.all_reduce((own - largest).exp().sum(1, keepdim=True)).log() + largest)[:, 0]
        return loss, (log_z * (labels != IGNORED)).square().sum()
    loss, z, _ = _Summed.apply(logits, labels, columns)
    return loss, z


def _without_gradient(logits: Tensor, labels: Tensor, columns: Columns | None) -> Tensor:
    """Returns `summed_cross_entropy_`; changes nothing."""
    if columns is None or columns.part is None:
        own = without_padding(logits, columns)
        return torch.nn.functional.cross_entropy(own, labels, ignore_index=IGNORED, reduction="sum")
    used, _, _, _, of_labels, total = _exponentiate(logits.detach().clone(), labels, columns)
    return (total.log() - of_labels).mul_(used).sum()


def _largest(own: Tensor, columns: Columns | None) -> Tensor:
    """Returns the largest logit of each row (N, 1), of those of all processes."""
    largest = own.amax(1, keepdim=True)
    if columns is None or columns.part is None:
        return largest
    return columns.part.group.all_reduce(largest, largest=True)


def _exponentiate(
    logits: Tensor, labels: Tensor, columns: Columns | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Writes exponentials over `logits` (N, W), of which those of each row's largest are 1 and those of padding 0.

    Returns, each (N, 1): whether a row's label counts, its label's column or 0, whether that is another process's
    (None where none is), the row's largest logit, its label's logit less the largest, and the sum of its exponentials.
    """
    used = (labels != IGNORED)[:, None]
    column = labels[:, None].masked_fill(~used, 0)  # another negative label is an error of `gather`
    elsewhere = None
    if columns is not None and columns.part is not None:
        column, elsewhere = columns.part.locate(column)
    own = without_padding(logits, columns)
    largest = _largest(own, columns)
    of_labels = own.gather(1, column) - largest
    own.sub_(largest).exp_()
    total = own.sum(1, keepdim=True)
    if columns is not None:
        logits[:, columns.classes :].zero_()
    if columns is not None and columns.part is not None and elsewhere is not None:
        of_labels = of_labels.masked_fill(elsewhere, 0.0)
        total, of_labels = columns.part.group.all_reduce(torch.cat([total, of_labels], 1)).split(1, 1)
    return used, column, elsewhere, largest, of_labels, total


def _subtract_at_labels(own: Tensor, column: Tensor, elsewhere: Tensor | None, share: Tensor) -> None:
    """Subtracts `share` (N, 1) at each row's `column`, where that is one of this process's."""
    own.scatter_add_(1, column, -(share if elsewhere is None else share.masked_fill(elsewhere, 0.0)))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, columns: Columns | None) -> tuple[Tensor, Tensor, Tensor]:
        used, column, elsewhere, largest, of_labels, total = _exponentiate(logits, labels, columns)
        ctx.columns = columns
        log_total = total.log()
        log_z = log_total + largest
        ctx.mark_dirty(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, total, column, elsewhere, used, log_z)
        return (log_total - of_labels).mul_(used).sum(), log_z.square().mul_(used).sum(), logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor | None, of_z: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
        logits, total, column, elsewhere, used, log_z = ctx.saved_tensors
        if of_loss is None and of_z is None:
            return None, None, None
        share = (0.0 if of_loss is None else of_loss) * used
        both = share if of_z is None else share + 2 * of_z * log_z * used
        own = without_padding(logits, ctx.columns).mul_(both / total)
        _subtract_at_labels(own, column, elsewhere, share.to(total.dtype))
        return logits, None, None

"""Summed cross entropy of logits in bf16 or fp16, in float32 and without a float32 copy of all of them.

The forward reads the logits once, for the logarithm of each row's sum of exponentials. The backward reads them once
more and writes the gradient over them: 6 bytes a logit. On a GPU both are compiled, and each becomes one kernel;
elsewhere, and without Triton, they run over a few rows at a time.

Letters: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terakoya.toolkit.objectives.columns import Columns, without_padding
from terakoya.toolkit.torch_operations import operation

IGNORED = -100
DTYPES = (torch.bfloat16, torch.float16)
ELEMENTS_AT_ONCE = 1 << 22
"""Logits of the rows that are converted to float32 together, where nothing is compiled."""


def summed_cross_entropy(logits: Tensor, labels: Tensor, columns: Columns | None = None) -> tuple[Tensor, Tensor]:
    """Returns the summed cross entropy of `logits` (N, W) against `labels` (N,) int64, -100 ignored, and the sum of
    log^2 Z over the other rows: float32 scalars. The backward overwrites the logits, and can run once. Columns that are
    no classes count nothing and get a gradient of 0."""
    loss, z = _Summed.apply(logits, labels, columns)
    return loss, z


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, columns: Columns | None) -> tuple[Tensor, Tensor]:
        used, own = labels != IGNORED, without_padding(logits, columns)
        if columns is not None and columns.part is not None:
            column, elsewhere = columns.part.locate(labels)
            labels = torch.where(used & ~elsewhere, column, IGNORED)
        log_z, of_labels = cross_entropy_rows(own, labels)
        if columns is not None and columns.part is not None:
            largest = columns.part.group.all_reduce(log_z, largest=True)
            both = columns.part.group.all_reduce(torch.stack([(log_z - largest).exp(), of_labels]))
            log_z, of_labels = both[0].log() + largest, both[1]
        ctx.set_materialize_grads(False)
        ctx.columns = columns
        ctx.save_for_backward(logits, labels, log_z, used)
        return (log_z - of_labels).mul_(used).sum(), log_z.square().mul_(used).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor | None, of_z: Tensor | None) -> tuple[Tensor | None, None, None]:
        logits, labels, log_z, used = ctx.saved_tensors
        if of_loss is None and of_z is None:
            return None, None, None
        share = torch.zeros_like(log_z) if of_loss is None else of_loss * used
        both = share if of_z is None else share + 2 * of_z * log_z * used
        if ctx.columns is not None and ctx.columns.part is not None:
            share = share * (labels != IGNORED)  # of labels that have a column here
        own = without_padding(logits, ctx.columns)
        cross_entropy_gradient_(own, labels, log_z, both, share)
        if ctx.columns is not None:
            logits[:, ctx.columns.classes :].zero_()
        return logits, None, None


def _like_row_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return rows, torch.empty_like(rows)


@operation(_like_row_sums)
def cross_entropy_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns of each row the logarithm of its sum of exponentials, (N,) float32, and the logit of its label, (N,)
    float32; 0 where the label is -100. Any other label outside [0, C) is an error."""
    if logits.device.type == "cuda" and _has_triton():
        log_z, of_labels = _compile(_rows)(logits, labels)
        return log_z, of_labels
    parts = [_rows(logits[rows], labels[rows]) for rows in _chunks(logits)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@operation(lambda *given: None, changes=("logits",))
def cross_entropy_gradient_(logits: Tensor, labels: Tensor, log_z: Tensor, both: Tensor, share: Tensor) -> None:
    """Overwrites `logits` (N, C) with `both` x softmax - `share` x one-hot of the label; `both`, `share` and the
    logarithms `log_z` are (N,) float32."""
    if logits.device.type == "cuda" and _has_triton():
        _compile(_gradient)(logits, labels, log_z, both, share)
        return
    for rows in _chunks(logits):
        part = logits[rows].float()
        part.sub_(log_z[rows, None]).exp_().mul_(both[rows, None])
        part.scatter_add_(1, labels[rows, None].clamp(min=0), -share[rows, None])
        logits[rows] = part.to(logits.dtype)


def _rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    used = labels != IGNORED
    of_labels = logits.gather(1, labels[:, None].masked_fill(~used[:, None], 0))[:, 0].float()
    return logits.float().logsumexp(1), of_labels * used


def _gradient(logits: Tensor, labels: Tensor, log_z: Tensor, both: Tensor, share: Tensor) -> None:
    """`cross_entropy_gradient_` in one expression, for a compiler."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    target = torch.where(classes == labels[:, None], share[:, None], 0.0)
    logits.copy_((logits.float() - log_z[:, None]).exp() * both[:, None] - target)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows with ELEMENTS_AT_ONCE logits at most, or one row; one empty slice where there are no rows."""
    rows, classes = logits.shape
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, classes))
    for start in range(0, max(1, rows), at_once):
        yield slice(start, start + at_once)


@cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=None)

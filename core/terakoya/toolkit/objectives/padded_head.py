"""A vocabulary head with a multiple of 64 columns, for a GPU: rows of 16-bit logits then begin at 128-byte boundaries,
with which Tensor Cores are most efficient (NVIDIA, Matrix Multiplication Background User's Guide).

Only the product sees the further columns. Weights, checkpoints and exports keep their shapes. Where processes divide
the vocabulary, each has a head of its own part, and pads that.

Letters: V vocabulary or this process's part of it, W columns of the padded head, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from terakoya.toolkit.objectives.columns import Columns, VocabularyPart
from terakoya.toolkit.torch_operations import is_traced

MULTIPLE = 64
DEVICES = ("cuda",)
"""Where heads are padded; a CPU gains nothing."""
OWN_FORWARD = "padded_forward"
"""The method of a head that keeps a padded weight itself, as in the bf16 stream: its forward, with W columns."""
PART = "vocabulary_part"
"""The attribute of a head with its `VocabularyPart`, where it has the rows of one."""


@contextlib.contextmanager
def padded_head(model: PreTrainedModel) -> Iterator[Columns | None]:
    """While open, the logits of `model` have W columns, of which the last W - V are 0 and mean nothing; of a divided
    vocabulary only this process's. Yields what the columns are, or None where they are the vocabulary.

    There are no further columns where V is a multiple of 64, the head is no plain linear layer whose weight is here
    whole, its product takes no Tensor Cores, or nothing is trained. What torch traces is padded by torch.

    Where the head has no `OWN_FORWARD`, the padded weight is made at its first call, in autocast's precision if that is
    on, and once if this is opened again while it is open.
    """
    head = model.get_output_embeddings()
    part = vocabulary_part(model)
    with contextlib.nullcontext() if part is None else part.alone():
        if isinstance(head, nn.Linear) and isinstance(head.__dict__.get("forward"), _PaddedForward):
            yield Columns(head.out_features, part)
            return
        if is_traced() or not torch.is_grad_enabled() or not _gains(head):
            yield None if part is None else Columns(part.count, part)
            return
        head.forward = _PaddedForward(head)
        try:
            yield Columns(head.out_features, part)
        finally:
            del head.forward


def vocabulary_part(model: PreTrainedModel) -> VocabularyPart | None:
    """Returns the part of the vocabulary whose rows this process has of the head of `model`; None where it has all."""
    part: VocabularyPart | None = getattr(model.get_output_embeddings(), PART, None)
    return part


def can_be_padded(head: nn.Module | None, device: torch.device | None = None) -> bool:
    """Whether `head` is a plain linear layer on a GPU, or will be on `device`, with its whole weight, whose V is no
    multiple of 64."""
    return (
        type(head) is nn.Linear
        and "forward" not in head.__dict__
        and head.out_features % MULTIPLE != 0
        and (device or head.weight.device).type in DEVICES
        and tuple(head.weight.shape) == (head.out_features, head.in_features)  # empty in ZeRO's third stage
        and not hasattr(head.weight, "placements")  # a DTensor's, of which this process has a part
    )


def pad_rows(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `value` (V, ...) as `dtype`, with rows of 0 up to a multiple of 64: (W, ...)."""
    padded = value.new_empty((-(-len(value) // MULTIPLE) * MULTIPLE, *value.shape[1:]), dtype=dtype)
    padded[: len(value)].copy_(value)
    padded[len(value) :].zero_()
    return padded


def _gains(head: nn.Module | None) -> bool:
    if hasattr(head, OWN_FORWARD):
        return True
    if not can_be_padded(head):
        return False
    assert isinstance(head, nn.Linear)
    # other float32 products take no Tensor Cores, and would pay for a copy of the weight
    return _product_dtype(head.weight) != torch.float32 or torch.backends.cuda.matmul.allow_tf32


def _product_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class _PaddedForward:
    """The forward of the linear layer `head`, with W outputs."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.padded: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns `hidden` (..., H) times the padded weight: (..., W)."""
        own = getattr(self.head, OWN_FORWARD, None)
        if own is not None:
            logits: Tensor = own(hidden)
            return logits
        if self.padded is None:
            weight, bias = self.head.weight, self.head.bias
            dtype = _product_dtype(weight)
            self.padded = _Padded.apply(weight, dtype), None if bias is None else _Padded.apply(bias, dtype)
        return nn.functional.linear(hidden, *self.padded)


class _Padded(torch.autograd.Function):
    """Casts and pads in one pass; the gradient is cut and cast in one, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.rows, ctx.dtype = len(value), value.dtype
        return pad_rows(value, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[: ctx.rows].to(ctx.dtype), None

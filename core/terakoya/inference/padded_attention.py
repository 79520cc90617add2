"""Attention of Transformers' own models in padded batches, without the two ways in which it returns NaN on GPUs.

- Padding may see nothing: in a layer of local attention, behind the last token that its window reaches. Transformers
  leaves the softmax of such a position to torch, which on some GPUs returns NaN for it, and NaN times zero is NaN in
  the mean of a text and in every gradient.
- cuDNN's kernel, which torch prefers from Hopper on, returns gradients that are not finite for some masks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from terakoya.toolkit.architectures import attention


def use_safe_attention() -> None:
    """Lets all models of Transformers in this process attend so that padding changes no other number."""
    AttentionMaskInterface.register("sdpa", mask_without_empty_rows)
    attention.leave_out_cudnn()


def mask_without_empty_rows(*arguments: Any, **settings: Any) -> Tensor | None:
    """Returns what Transformers' `sdpa_mask` returns, (B, 1, T, S) bool or None, but a position that sees nothing sees
    all: what it becomes is nobody's input."""
    mask: Tensor | None = sdpa_mask(*arguments, **settings)
    return None if mask is None else mask | ~mask.any(-1, keepdim=True)

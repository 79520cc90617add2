"""Attention that keeps the documents of one row apart, registered once with Transformers' AttentionInterface.

Encoders see their whole document (`arguments`), causal models what stands before in it (`causal_arguments`).

Every model that calls its attention through the interface gets it: no mask function is registered under these names,
so Transformers hands over no mask of its own, and what `arguments` returns travels through the model's keyword
arguments to each layer.

Letters in shapes: B rows, T positions, N heads, D size of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from terakoya import document_attention
from terakoya.errors import UserError

PREFIX = "terakoya_"
BACKENDS = ("sdpa", "eager", "flash")
WHOLE_ROWS = "whole_rows"
"""The name in a batch, of an empty tensor, that says: each row is one document with padding behind it."""


def document_mask(document_ids: Tensor, seen: Tensor | None = None) -> Tensor:
    """Which position may look at which, (B, 1, T, T) bool, from `document_ids` (B, T), -1 for padding; with the ids
    `seen` (B, S) of other positions, as a decoder sees an encoder's, (B, 1, T, S).

    Padding looks at padding, so that no row of the softmax is empty; nothing that counts looks at it.
    """
    seen = document_ids if seen is None else seen
    return (document_ids[:, None, :, None] == seen[:, None, None, :]).contiguous()


def causal_mask(document_ids: Tensor) -> Tensor:
    """`document_mask` (B, 1, T, T) without all that comes later."""
    return document_mask(document_ids).tril()


def boundaries(document_ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Cumulative document lengths over the flattened rows, for variable-length kernels.

    Args:
        document_ids: (B, T), equal neighbours belong together, -1 for padding (a document of its own in each row).

    Returns:
        `cu_seqlens` (B * T + 1,) int32: starts of documents, then the total repeated, so that the shape never depends
        on the data; and the upper bound T of a document's length.
    """
    rows, length = document_ids.shape
    starts = np.ones((rows, length), dtype=bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    found = np.flatnonzero(starts.ravel())
    cu_seqlens = np.full(rows * length + 1, rows * length, dtype=np.int32)
    cu_seqlens[: len(found)] = found
    return cu_seqlens, length


def arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a model's forward is called with so that each of its layers keeps documents apart.

    `batch` holds `document_ids` (B, T); for the flash backend also `cu_seqlens` from `boundaries`.
    """
    if model.config._attn_implementation == PREFIX + "flash":
        length = batch["document_ids"].shape[1]
        return {"cu_seqlens": batch["cu_seqlens"], "max_document_length": length}
    return {"document_mask": document_mask(batch["document_ids"])}


def causal_arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """`arguments` for a causal model: each position sees its own document up to itself.

    Where `batch` has WHOLE_ROWS, each row is one document with padding behind it: no mask is made. Nor is one for sdpa
    on a CPU, which takes one document after another.
    """
    backend, document_ids = model.config._attn_implementation, batch["document_ids"]
    if backend == PREFIX + "flash":
        return {**arguments(model, batch), "causal": True}
    if WHOLE_ROWS in batch:
        return {"causal": True}
    if backend == PREFIX + "sdpa" and document_ids.device.type == "cpu":
        return {"causal": True, "document_lengths": document_attention.lengths(document_ids)}
    return {"document_mask": causal_mask(document_ids)}


def additive(allowed: Tensor) -> Tensor:
    """What models that add a mask to their scores are handed: float32, 0 where `allowed`, else hardly above -inf.

    The number is bfloat16's lowest, so that under autocast too a row of nothing allowed is no row of NaN; under that of
    float16 half of its lowest, so that scores can be added.
    """
    nothing, kind = torch.zeros((), device=allowed.device), allowed.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    least = torch.finfo(torch.float16).min / 2 if half else torch.finfo(torch.bfloat16).min
    return torch.where(allowed, nothing, nothing + least)


def _allowed(document_mask: Tensor, sliding_window: int | None) -> Tensor:
    """`document_mask` (B, 1, T, T), in a layer of local attention less all that is `sliding_window` places away."""
    if sliding_window is None:
        return document_mask
    place = torch.arange(document_mask.shape[-1], device=document_mask.device)
    return document_mask & ((place[:, None] - place).abs() < sliding_window)


def _triangle(query: Tensor, sliding_window: int | None) -> Tensor:
    """What each position of `query` (B, N, T, D) may look at in a row that is one document, (1, 1, T, T) bool."""
    length = query.shape[2]
    whole = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
    return _allowed(whole, sliding_window)


def _biased(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor:
    """What is added to the scores. Raises TypeError where nothing says which documents belong together."""
    if attention_mask is None:
        raise TypeError("attention needs document_mask, or an additive attention_mask of four dimensions")
    return attention_mask if position_bias is None else attention_mask + position_bias


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_mask: Tensor | None = None,
    document_lengths: Sequence[int] | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's scaled dot-product attention over `query`, `key`, `value` (B, N, T, D); returns (B, T, N, D).

    `key` and `value` may have fewer heads, each for as many neighbouring ones of `query`. With `causal` and neither
    `document_mask` nor `document_lengths` a row is one document. Without any of them the model has handed its layers an
    `additive` mask itself, to which T5's `position_bias` (1, N, T, T) comes.
    """
    if document_lengths is not None:
        alone = partial(
            _sdpa, module, attention_mask=None, causal=causal, sliding_window=sliding_window, scaling=scaling,
            dropout=dropout,
        )  # fmt: skip
        return document_attention.by_document(alone, query, key, value, document_lengths), None
    grouped = query.shape[1] != key.shape[1]
    mask: Tensor | None = None
    if document_mask is not None:
        mask = _allowed(document_mask, sliding_window)
    elif not causal:
        mask = _biased(attention_mask, position_bias).to(query.dtype)
    elif sliding_window is not None and sliding_window < query.shape[2]:
        mask = _triangle(query, sliding_window)
    attended = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2), None


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_mask: Tensor | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out, softmax in float32; the reference for the others. Same arguments as `_sdpa`."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if document_mask is None and causal:
        document_mask = _triangle(query, None)
    if document_mask is not None:
        scores = scores.masked_fill(~_allowed(document_mask, sliding_window), torch.finfo(scores.dtype).min)
    else:
        scores = scores + _biased(attention_mask, position_bias)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    max_document_length: int,
    causal: bool = False,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's own variable-length flash attention; has no dropout, computes documents only. Same shapes as `_sdpa`."""
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0.0, "refused by `use`"
    rows, length = query.shape[0], query.shape[2]

    def flat(states: Tensor) -> Tensor:
        return states.transpose(1, 2).flatten(0, 1).contiguous()

    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        flat_query = flat(query * (scaling * query.shape[-1] ** 0.5))  # the kernel's own scale is the usual one
    else:
        flat_query = flat(query)
    groups = query.shape[1] // key.shape[1]
    further: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        further["enable_gqa"] = True
    elif groups > 1:  # torch 2.11
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    longest = max_document_length
    side = -1 if sliding_window is None else sliding_window - 1  # -1: no bound
    window = (side, 0 if causal else side)
    attended = varlen_attn(
        flat_query, flat(key), flat(value), cu_seqlens, cu_seqlens, longest, longest, window_size=window, **further
    )
    assert isinstance(attended, Tensor)
    return attended.unflatten(0, (rows, length)), None


for _name, _function in (("sdpa", _sdpa), ("eager", _eager), ("flash", _flash)):
    AttentionInterface.register(PREFIX + _name, _function)


def choose(
    requested: str, *, device: torch.device, precision: str, dropout: float, isolation: str = "interface"
) -> str:
    """The backend for `"attention": requested`: `auto` takes what is exact and has dropout.

    An architecture whose `isolation` is not "interface" masks in its own way, which flash cannot.

    Raises:
        UserError: the backend cannot do what the run asks of it.
    """
    if requested == "auto":
        fits = device.type == "cuda" and precision != "fp32" and dropout == 0.0 and isolation == "interface"
        return "flash" if fits else "sdpa"
    if requested == "flash":
        if isolation != "interface":
            raise UserError(
                "attention: flash is for models that attend through Transformers' AttentionInterface, which this "
                'architecture does not; use "attention": "sdpa"'
            )
        if dropout:
            raise UserError(
                f"attention: flash has no dropout, but the architecture's attention has {dropout}; "
                'set it to 0.0 or use "attention": "sdpa"'
            )
        if device.type != "cuda" or precision == "fp32":
            raise UserError(
                f"attention: flash needs a GPU and bf16 or fp16, got {device.type} and {precision}; use "
                '"attention": "sdpa"'
            )
    return requested


def dropout(module: nn.Module) -> float:
    """The largest dropout of attention among the Transformers models inside `module`."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    return max((float(getattr(model.config, name, 0.0)) for model in models for name in names), default=0.0)


def use(module: nn.Module, backend: str) -> None:
    """Sets `backend` ("sdpa", "eager" or "flash") on every Transformers model inside `module`."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = PREFIX + backend


def release(model: PreTrainedModel) -> None:
    """Gives `model` back Transformers' own attention, for saving and for use outside a run."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # a model without sdpa would be handed no mask at all where sdpa needs none
            part.config._attn_implementation = "sdpa" if part._supports_sdpa else "eager"

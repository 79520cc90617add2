"""The functions that compute attention. `attention` registers them with Transformers.

Letters in shapes: B rows, T positions, N heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terakoya.errors import UserError
from terakoya.toolkit.architectures import _document_attention, _window_attention

SHORT = 512
"""Keys, below which torch's kernel for a CPU is slower in bfloat16 than in float32: 2.4 times with 128 (EPYC, AVX-512),
with 512 as fast."""


def leave_out_cudnn() -> None:
    """Lets `scaled_dot_product_attention` choose among torch's own kernels.

    cuDNN's, which torch prefers from Hopper on, returns gradients that are not finite for some masks (pytorch#196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _window_mask(document_mask: Tensor, sliding_window: int | None, first_query: int = 0) -> Tensor:
    """Returns `document_mask` (B, 1, t, T), whose queries begin with position `first_query`; in a layer of local
    attention, without positions that are `sliding_window` or more away."""
    if sliding_window is None:
        return document_mask
    position = torch.arange(document_mask.shape[-1], device=document_mask.device)
    queries = position[first_query : first_query + document_mask.shape[-2]]
    return document_mask & ((queries[:, None] - position).abs() < sliding_window)


def _triangle(query: Tensor, sliding_window: int | None) -> Tensor:
    """Returns the causal mask (1, 1, T, T) bool of a row that is one document, for `query` (B, N, T, D)."""
    length = query.shape[2]
    whole = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
    return _window_mask(whole, sliding_window)


def _additive_mask(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor:
    """Returns the additive mask of the scores. Raises TypeError if there is no mask."""
    if attention_mask is None:
        raise TypeError("attention needs document_mask, or an additive attention_mask of four dimensions")
    if position_bias is None:
        return attention_mask
    # the mask has two values, which every dtype holds: the sum, larger by heads, is written in that of the bias
    return attention_mask.to(position_bias.dtype) + position_bias


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_mask: Tensor | None = None,
    document_lengths: Sequence[int] | None = None,
    causal: bool = False,
    first_query: int = 0,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Computes torch's scaled dot-product attention over `query`, `key`, `value` (B, N, T, D); returns (B, T, N, D).

    `key` and `value` may have fewer heads, each shared by equally many neighbouring heads of `query`. With `causal` and
    neither `document_mask` nor `document_lengths`, a row is one document. Without all three, the model itself has
    passed an `additive` mask to its layers, to which T5's `position_bias` (1, N, T, T) is added. With a `document_mask`
    (B, 1, t, T) `query` (B, N, t, D) is a slice of the positions, from `first_query` on. torch's function has neither
    `softcap` nor `s_aux`: with one of them `eager` computes the attention.
    """
    if document_lengths is not None:
        attend = partial(
            sdpa, module, attention_mask=None, causal=causal, sliding_window=sliding_window, scaling=scaling,
            dropout=dropout, softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
        return _document_attention.by_document(attend, query, key, value, document_lengths), None
    if softcap is not None or s_aux is not None:
        attended, _ = eager(
            module, query, key, value, attention_mask, document_mask=document_mask, causal=causal,
            first_query=first_query, sliding_window=sliding_window, position_bias=position_bias, scaling=scaling,
            dropout=dropout, softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
        return attended, None
    fused = partial(_attend_fused, dropout=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    mask: Tensor | None = None
    if document_mask is not None:
        mask = _window_mask(document_mask, sliding_window, first_query)
        if sliding_window is not None and query.device.type == "cpu" and query.shape == key.shape:
            size = _window_attention.block_size(query.shape[2], reach := sliding_window - 1)
            if size is not None:
                blocks = _window_attention.by_block(fused, query, key, value, mask, size=size, reach=reach)
                return blocks.transpose(1, 2), None
    elif not causal:
        mask = _additive_mask(attention_mask, position_bias).to(query.dtype)
    elif sliding_window is not None and sliding_window < query.shape[2]:
        mask = _triangle(query, sliding_window)
    return fused(query, key, value, mask).transpose(1, 2), None


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, **options: Any
) -> Tensor:
    """Returns torch's scaled dot-product attention, causal without a `mask`; computed on a CPU in float32 where that is
    faster."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16 and key.shape[2] < SHORT:
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
        with torch.autocast("cpu", enabled=False):
            attended = _attend_fused(query.float(), key.float(), value.float(), mask, dropout=dropout, **options)
        return attended.to(value.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None, **options)


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_mask: Tensor | None = None,
    causal: bool = False,
    first_query: int = 0,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention step by step, softmax in float32; the reference for the other backends. Arguments as in
    `sdpa`.

    `softcap` limits scores smoothly to (-softcap, softcap), as in Gemma 2. `s_aux` (N,) is the score of each head's
    attention sink, as in GPT-OSS: a position that takes its part of the softmax and has no value.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if document_mask is None and causal:
        document_mask = _triangle(query, None)
    if document_mask is not None:
        scores = scores.masked_fill(
            ~_window_mask(document_mask, sliding_window, first_query), torch.finfo(scores.dtype).min
        )
    else:
        scores = scores + _additive_mask(attention_mask, position_bias)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = weights if s_aux is None else weights[..., :-1]
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    longest_document: Tensor,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = False,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, None]:
    """Computes torch's variable-length flash attention: no dropout, no work outside documents. Shapes as in `sdpa`;
    `cu_seqlens` and `longest_document` are those of `attention.boundary_arrays`. With `cu_seqlens_q`, of
    `attention.query_boundaries`, `query` (B, N, t, D) is a slice of the positions. Raises UserError for such a slice in
    a layer of local attention that is not causal."""
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0.0, "refused by `choose`"
    if cu_seqlens_q is not None and sliding_window is not None and not causal:
        raise UserError(  # the kernel counts a window's positions from the ends of documents
            'attention: flash with parallel.cp_size has no local attention to both sides; use "attention": "sdpa"'
        )
    rows, length, device = query.shape[0], query.shape[2], query.device.type
    # autocast converts the operands of torch's other attention, not of this kernel, which takes bf16 and fp16 alone;
    # rotary positions turn query and key into float32
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype

    def flat(states: Tensor) -> Tensor:
        flat_states = states.transpose(1, 2).flatten(0, 1).to(dtype)
        # the kernel takes heads that are parts of longer rows, but each value next to the last
        return flat_states if flat_states.stride(-1) == 1 else flat_states.contiguous()

    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)  # the kernel's own scale is 1 / sqrt(D)
    groups = query.shape[1] // key.shape[1]
    named = varlen_attn.__kwdefaults__ or {}  # torch 2.11's function takes fewer key heads without an argument
    further: dict[str, Any] = {"enable_gqa": True} if groups > 1 and "enable_gqa" in named else {}
    longest = longest_document.shape[0]
    side = -1 if sliding_window is None else sliding_window - 1  # -1: unlimited
    window = (side, 0 if causal else side)
    starts = cu_seqlens if cu_seqlens_q is None else cu_seqlens_q
    attended = varlen_attn(
        flat(query), flat(key), flat(value), starts, cu_seqlens, longest, longest, window_size=window, **further
    )
    assert isinstance(attended, Tensor)
    return attended.unflatten(0, (rows, length)), None

"""Memory that the backward of torch's variable-length flash attention takes while it runs, besides its results.

The kernel allocates it itself, so no operation on tensors without data returns it.
"""

from __future__ import annotations

from torch import Tensor

OPERATION = "torch_attn::_varlen_attn_backward"
"""The name of the kernel's backward."""
FLOAT32 = 4
BLOCK = 128
"""Positions that the kernel keeps free after each document, those that are not there included."""


def backward_scratch(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> int:
    """Returns the bytes that the backward allocates and frees: of R positions, N heads of size D and room for B
    documents, D rounded up to a multiple of 32 (of 64 above 128),

    - 4 (R + 128 B) N D, the sum of the queries' gradients in float32;
    - 4 (R + 128 B) N, the sum over each softmax's gradient in float32;
    - where `key` has fewer heads than `query`, R N D twice in their own precision: the gradients of keys and values
      before they are added up over the heads that share them.

    The logarithm of each softmax's sum, (N, R) in float32, is a result of the forward, and counted as one. Source:
    `mha_varlen_bwd` in pytorch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (03b7c19). With
    deterministic algorithms the first is there as often as B N goes into a card's multiprocessors, rounded up: once
    from 3 heads on, as B is 64 at least and an H200 has 132.

    Args:
        query: (R, N, D).
        key: (R, M, D), where M divides N.
        cu_seqlens: (B + 1,).
    """
    positions, heads, size = query.shape
    padded = positions + BLOCK * (len(cu_seqlens) - 1)
    multiple = 32 if size <= 128 else 64
    rounded = -(-size // multiple) * multiple
    shared = 2 * key.shape[0] * heads * size * query.element_size() if key.shape[1] != heads else 0
    return FLOAT32 * padded * heads * (rounded + 1) + shared

"""torch's variable-length flash attention on a CPU: slow kernels for the operations, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from slow_varlen import slow_varlen
from torch import Tensor
from torch.nn.attention import varlen as varlen  # registers the operations


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool,
    scale: float | None, window: Sequence[int], gqa: bool = False, *_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert scale is None
    result = slow_varlen(
        query, key, value, cu_q, cu_k, max_q, max_k, window_size=(window[0], window[1]), enable_gqa=gqa
    )
    return result, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor,
    cu_k: Tensor, max_q: int, max_k: int, causal: bool, rng: Tensor, scale: float | None = None,
    window: Sequence[int] | None = None, *_: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert scale is None
    sides = (-1, -1) if window is None else (window[0], window[1])

    def differentiate() -> tuple[Tensor, ...]:
        states = [each.detach().requires_grad_() for each in (query, key, value)]
        result = slow_varlen(
            *states, cu_q, cu_k, max_q, max_k, window_size=sides, enable_gqa=query.shape[1] != key.shape[1]
        )
        return torch.autograd.grad(result, states, gradient)

    with ThreadPoolExecutor(1) as thread:  # within an operation this thread records no gradients
        return thread.submit(differentiate).result()


@contextmanager
def flash_on_a_cpu() -> Iterator[None]:
    """While open, the operations behind `varlen_attn` have kernels for the CPU, of any dtype."""
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", _forward, "CPU", allow_override=True)
        library.impl("_varlen_attn_backward", _backward, "CPU", allow_override=True)
        yield

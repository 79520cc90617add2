"""torch's variable-length attention, slowly, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def slow_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's variable-length kernel as documented, on any device: (left, right) positions are visible."""
    assert enable_gqa == (query.shape[1] != key.shape[1]) and torch.equal(cu_seq_q, cu_seq_k)
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    left, right = window_size
    result = torch.zeros_like(query)
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        assert stop - start <= max_q == max_k
        if start == stop:
            continue
        place = torch.arange(stop - start)
        ahead = place[None, :] - place[:, None]
        allowed = ((ahead <= right) | (right < 0)) & ((-ahead <= left) | (left < 0))
        scores = torch.einsum("qnd,knd->nqk", query[start:stop], key[start:stop]) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        result[start:stop] = torch.einsum("nqk,knd->qnd", weights, value[start:stop])
    return result

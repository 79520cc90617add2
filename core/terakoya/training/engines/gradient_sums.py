"""All-reduces gradients outside of DDP and `fully_shard`, several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that are all-reduced at once; DDP's own default."""


def all_reduce_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sums the gradients of `parameters` over `group`, several at once; does nothing where it is None."""
    if group is None:
        return
    for bucket in _buckets([value.grad for value in parameters if value.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields `gradients` in groups of at most `BUCKET_BYTES`; a larger gradient is a group of its own."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and size + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket

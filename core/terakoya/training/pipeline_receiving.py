"""torch's `PipelineStage` with a place for what a stage receives only while it is needed.

torch makes one for every micro-batch of a step, either way, and keeps them all: with hundreds of micro-batches more
than the activations themselves. Here a place is made when a receipt begins and let go after the micro-batch's backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage


class ReceivingStage(PipelineStage):
    """A stage whose received hidden states, and gradients of those it sent, all have the same `shape`, float32."""

    def __init__(self, *arguments: Any, shape: tuple[int, ...], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.shape = shape
        self.emptied = False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        self._make_places(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        self._make_places(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        """See `PipelineStage`."""
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for infos in (self.args_recv_info, self.grad_recv_info):
            _let_go(infos[bwd_chunk_id])

    def _make_places(self, infos: dict[int, tuple[Any, ...]], chunk: int) -> None:
        """Room for what the micro-batch `chunk` receives; before the first, what torch has made goes."""
        if not self.emptied:
            self.emptied = True
            for each in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                _let_go(each)
        for info in _received(infos.get(chunk, ())):
            info.buffer = torch.empty(self.shape, device=self.device)


def _let_go(infos: Iterable[Any]) -> None:
    for info in _received(infos):
        info.buffer = None


def _received(infos: Iterable[Any]) -> list[Any]:
    """Those of `infos` that come from another stage, and are no arguments of the schedule's caller."""
    return [info for info in infos if getattr(info, "source", None) is not None]

"""torch's `PipelineStage` with a place for what a stage receives only while it is needed.

torch makes one for every micro-batch of a step, either way, and keeps them all: with hundreds of micro-batches more
than the activations themselves. Here a place is made when a receipt begins and let go after the micro-batch's backward;
until then and from then on a tensor without memory stands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

NOWHERE = torch.device("meta")


class ReceivingStage(PipelineStage):
    """A stage whose received hidden states, and gradients of those it sent, all have the same `shape`, float32; it is
    told shapes of what goes in and comes out, so that none are tried."""

    def __init__(self, *arguments: Any, shape: tuple[int, ...], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.shape = shape

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        for info in _received(self.args_recv_info[fwd_chunk_id]):
            info.buffer = self._place(self.device).requires_grad_(self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        for info in _received(self.grad_recv_info.get(bwd_chunk_id, ())):
            info.buffer = self._place(self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        """See `PipelineStage`."""
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in _received(infos[bwd_chunk_id]):
                info.buffer = self._place(NOWHERE)

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        """torch's own places for hidden states, none of which has memory."""
        with self._nowhere():
            return super()._prepare_forward_infra(*arguments, **named)

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        """torch's own places for gradients, none of which has memory."""
        with self._nowhere():
            return super()._prepare_backward_infra(*arguments, **named)

    @contextmanager
    def _nowhere(self) -> Iterator[None]:
        device, self.device = self.device, NOWHERE
        try:
            yield
        finally:
            self.device = device

    def _place(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=torch.float32, device=device)


def _received(infos: Iterable[Any]) -> list[Any]:
    """Those of `infos` that come from another stage, and are no arguments of the schedule's caller."""
    return [info for info in infos if getattr(info, "source", None) is not None]

"""torch's `PipelineStage` with receive buffers that exist only while they are needed.

torch allocates buffers for every micro-batch of a step, in both directions, and keeps them: with hundreds of
micro-batches they take more memory than the activations. Here a buffer is allocated when a receive begins and freed
after the micro-batch's backward; before and after that a tensor without memory takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from terakoya.training.engines.pipeline_stage import Stage

META = torch.device("meta")
"""The device of tensors without memory."""


class ReceivingStage(PipelineStage):
    """A `stage` of `count` that receives hidden states (`rows`, `length`, H), and gradients of those that it sent,
    float32. Shapes of inputs and outputs are given, so that torch need not find them in a trial run."""

    def __init__(self, stage: Stage, count: int, rows: int, length: int, group: dist.ProcessGroup) -> None:
        self.shape = (rows, length, stage.hidden_size)
        hidden, loss = (torch.empty(shape, device=META, requires_grad=True) for shape in (self.shape, ()))
        super().__init__(
            stage,
            stage.index,
            count,
            stage.device,
            input_args=() if stage.first else (hidden,),
            output_args=(loss if stage.last else hidden,),
            group=group,
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """See `PipelineStage`; tells the module which micro-batch it is."""
        self.submod.number = fwd_chunk_id  # type: ignore[assignment]
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        for info in _receive_infos(self.args_recv_info[fwd_chunk_id]):
            info.buffer = self._buffer(self.device).requires_grad_(self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        for info in _receive_infos(self.grad_recv_info.get(bwd_chunk_id, ())):
            info.buffer = self._buffer(self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        """See `PipelineStage`."""
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in _receive_infos(infos.get(bwd_chunk_id, ())):
                info.buffer = self._buffer(META)
        if self.has_backward:
            # torch sends the gradient as it comes, and from a backward without weights it may come as a view
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
            )

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        """Makes torch allocate its buffers for hidden states without memory."""
        with self._on_meta():
            return super()._prepare_forward_infra(*arguments, **named)

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        """Makes torch allocate its buffers for gradients without memory."""
        with self._on_meta():
            return super()._prepare_backward_infra(*arguments, **named)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, META
        try:
            yield
        finally:
            self.device = device

    def _buffer(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=torch.float32, device=device)


def _receive_infos(infos: Iterable[Any]) -> list[Any]:
    """Those of `infos` that describe tensors from another stage, not arguments of the schedule's caller."""
    return [info for info in infos if getattr(info, "source", None) is not None]

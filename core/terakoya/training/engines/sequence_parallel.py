"""Ulysses sequence parallelism as an `Engine`: the processes of a replica divide the positions of its rows.

Every process of a replica has all weights and the same slice of each of the replica's rows, so it keeps only its part
of the activations. Processes communicate in every attention (`sequence_attention`), and once a step all processes
all-reduce gradients as under DDP. Losses are sums over positions, so each process has the sums of its own positions,
and the gradient of each weight is the sum over all processes. The engine needs an objective whose terms are sums over
positions (`Objective.sums_by_position`) and a model whose attention takes an `Exchange`.

Letters in shapes: B rows, T positions of a row, P processes that share them, K slots of masked positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from terakoya.components import Optimizer
from terakoya.toolkit.architectures.attention import EXCHANGE
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.sequence_attention import UlyssesExchange

WHOLE = "document_ids"
"""The array (B, T) that every process needs whole: it says which positions may attend to each other."""
MASKED_POSITIONS, MASKED_LABELS = "masked_positions", "masked_labels"
"""Indices (K,) into the flattened rows, and the labels there (K,)."""


class SequenceParallelEngine(DDPEngine):
    """DDP over all processes, each of which works on a slice of the positions of its replica's rows."""

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        precision: str,
        max_grad_norm: float,
        micro_steps: int,
        scaler: LossScaler | None = None,
    ) -> None:
        assert context.replica_group is not None, "a replica of one process has nothing to divide"
        module.to(context.device)
        super().__init__(
            context, module, optimizer.build(module, fused=context.device.type in ("cpu", "cuda")),
            precision=precision, max_grad_norm=max_grad_norm, scaler=scaler, micro_steps=micro_steps,
        )  # fmt: skip
        self.exchange = UlyssesExchange(context.replica_group)
        self.index = dist.get_rank(context.replica_group)

    def gradient_group(self) -> dist.ProcessGroup | None:
        """All processes: those of one replica have gradients of different positions."""
        return dist.group.WORLD

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`; the sums are those of this process's positions."""
        return super().micro_step(self._own_slice(batch), loss_fn, last=last)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; the sums are those of this process's positions."""
        return super().evaluate(self._own_slice(batch))

    def _own_slice(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {**slice_positions(batch, self.index, self.exchange.processes), EXCHANGE: self.exchange}


def slice_positions(batch: Mapping[str, Tensor], index: int, processes: int) -> dict[str, Tensor]:
    """Returns the part of `batch`, whose rows are (B, T), that process `index` of `processes` works on.

    Arrays (B, T) become slice `index` of their positions, (B, T / P), except for `document_ids`, which stays whole. Of
    masked positions those within the slice remain, as indices into the flattened slices. Other entries do not change.
    """
    rows, length = batch[WHOLE].shape
    size, rest = divmod(length, processes)
    assert not rest, "checked when the parameters are read"
    first = index * size
    part = {
        name: value[:, first : first + size] if value.shape == (rows, length) and name != WHOLE else value
        for name, value in batch.items()
    }
    if MASKED_POSITIONS in batch:
        row, position = batch[MASKED_POSITIONS] // length, batch[MASKED_POSITIONS] % length
        inside = (position >= first) & (position < first + size)
        part[MASKED_POSITIONS] = (row * size + position - first)[inside]
        part[MASKED_LABELS] = batch[MASKED_LABELS][inside]
    return part

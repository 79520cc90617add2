"""Processes that share the positions of their rows (Ulysses sequence parallelism), as an `Engine`.

Every process of a replica has all weights, and the same slice of each of the replica's rows: what a row leaves behind
for its backward is spread over them. `sequence_attention` brings positions together where attention needs them. Losses
are sums over positions, so each process has the sums of its own, and the gradient of each weight is the sum over all
processes.

Letters in shapes: B rows, T positions of a row, P processes that share them, K slots of masked positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.toolkit.architectures.attention import EXCHANGE
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.sequence_attention import UlyssesExchange

WHOLE = "document_ids"
"""The array (B, T) that every process needs whole: who may look at whom."""
PLACES, LABELS = "masked_positions", "masked_labels"
"""Places (K,) in the flattened rows, and what belongs there (K,)."""


class SequenceParallelEngine(DDPEngine):
    """DDP over all processes, each at work on a slice of the positions of its replica's rows."""

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        parameters: Parameters,
        vocabulary: Vocabulary,
        *,
        scaler: LossScaler | None = None,
        micro_steps: int,
    ) -> None:
        assert context.replica_group is not None, "a replica of one process has nothing to share"
        module.to(context.device)
        optimizer = parameters.optimizer.build(module, fused=context.device.type in ("cpu", "cuda"))
        super().__init__(
            context, module, optimizer,
            precision=parameters.precision, max_grad_norm=parameters.max_grad_norm, scaler=scaler,
            micro_steps=micro_steps,
        )  # fmt: skip
        self.exchange = UlyssesExchange(context.replica_group)
        self.place = dist.get_rank(context.replica_group)

    def reducing(self) -> dist.ProcessGroup | None:
        """All processes: those of a replica have gradients of different positions."""
        return dist.group.WORLD

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`; the sums are those of this process's positions."""
        return super().micro_step(self._mine(batch), loss_fn, last=last)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; the sums are those of this process's positions."""
        return super().evaluate(self._mine(batch))

    def _mine(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {**slice_positions(batch, self.place, self.exchange.processes), EXCHANGE: self.exchange}


def slice_positions(batch: Mapping[str, Tensor], place: int, processes: int) -> dict[str, Tensor]:
    """What the process `place` of `processes` has of `batch`, whose rows are (B, T).

    Of every array (B, T) the `place`-th of as many slices of the positions, (B, T / P), but the whole `document_ids`;
    of masked positions those within the slice, as places in the flattened slices; the rest as it is.
    """
    rows, length = batch[WHOLE].shape
    size, rest = divmod(length, processes)
    assert not rest, "conflicts.py lets no such rows through"
    first = place * size
    mine = {
        name: value[:, first : first + size] if value.shape == (rows, length) and name != WHOLE else value
        for name, value in batch.items()
    }
    if PLACES in batch:
        row, position = batch[PLACES] // length, batch[PLACES] % length
        here = (position >= first) & (position < first + size)
        mine[PLACES] = (row * size + position - first)[here]
        mine[LABELS] = batch[LABELS][here]
    return mine

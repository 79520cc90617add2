"""The micro-batches of one rank: which rows, collated on the host ahead of time, moved to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terakoya.components import Batch, Objective
from terakoya.components.vocabulary import Vocabulary
from terakoya.rows.loader import Loader
from terakoya.toolkit.architectures.attention import boundaries
from terakoya.training.distributed.topology import RankBatch


@dataclass(frozen=True)
class StepBatches:
    """What one rank runs in one optimizer step.

    Attributes:
        real: its micro-batches, at most `rank_batch.micro_steps` of them.
        dummy: one row that counts nothing, run in the micro-steps that other ranks have and this one has not; None
            where there are none.
    """

    real: list[Batch]
    dummy: Batch | None


class BatchMaker:
    """From a step's number to this rank's `StepBatches`: a pure function, called ahead in a thread."""

    def __init__(
        self,
        loader: Loader,
        objective: Objective,
        vocabulary: Vocabulary,
        rank_batch: RankBatch,
        *,
        end: int | None = None,
    ) -> None:
        """`end` is the row that the run ends before, where it ends by rows: the last step may hold fewer."""
        self.loader = loader
        self.objective = objective
        self.vocabulary = vocabulary
        self.rank_batch = rank_batch
        self.end = end
        self.first_step = self.first_row = 0

    def begin(self, step: int, row: int) -> None:
        """Counts from here: step `step` starts with row `row`. Not `step` times the global batch where a run that ended
        by rows goes on."""
        self.first_step, self.first_row = step, row

    def rows(self, step: int) -> tuple[int, int]:
        """The rows [start, stop) of the order that optimizer step `step` takes, on all ranks together."""
        start = self.first_row + (step - self.first_step) * self.rank_batch.global_rows
        stop = start + self.rank_batch.global_rows
        return start, stop if self.end is None else max(start, min(stop, self.end))

    def __call__(self, step: int) -> StepBatches:
        """The micro-batches of optimizer step `step`, counted from 0."""
        rank_batch = self.rank_batch
        first, last = self.rows(step)
        real = [
            self.objective.collate(self.loader.load(first + start, min(first + stop, last)), self.vocabulary)
            for start, stop in rank_batch.micro_batches()
            if first + start < last
        ]
        return StepBatches(real, self.dummy() if len(real) < rank_batch.micro_steps else None)

    def dummy(self) -> Batch:
        """One row with nothing to learn."""
        return self.objective.collate(self.loader.blank_row(), self.vocabulary)


def to_device(batch: Batch, device: torch.device, *, flash: bool) -> dict[str, Tensor]:
    """The tensors of `batch` on `device`, copied without waiting; with `flash` also `cu_seqlens`."""
    arrays = dict(batch.arrays)
    if flash:
        arrays["cu_seqlens"], _ = boundaries(arrays["document_ids"])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return tensors
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}

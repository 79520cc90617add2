"""Micro-batches copied to a GPU by the thread that reads ahead, on a stream of their own, while earlier steps run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from terakoya.components import Batch
from terakoya.rows.loader import AHEAD
from terakoya.training.batches import Copy, StepBatches

MOST_BYTES = 64 << 20
"""Bytes on the device of all batches that are ahead of their steps."""


class CopyAhead:
    """Makes the micro-batches of a step by `make`, and on a GPU begins to copy the first of them there by `to_device`:
    as many as a step's share of `MOST_BYTES` has room for. A thread calls it."""

    def __init__(
        self,
        make: Callable[[int], StepBatches],
        to_device: Callable[[Batch, torch.device], dict[str, Tensor]],
        device: torch.device,
    ) -> None:
        self.make = make
        self.device = device
        self.to_device = to_device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, step: int) -> StepBatches:
        """Returns the micro-batches of optimizer step `step`, counted from 0."""
        batches = self.make(step)
        if self.stream is None:
            return batches
        copies: list[Copy] = []
        left = MOST_BYTES // AHEAD
        for batch in batches.real:
            left -= sum(array.nbytes for array in batch.arrays.values())
            if left < 0:
                break
            copies.append(self._copy(batch))
        return replace(batches, copies=copies)

    def _copy(self, batch: Batch) -> Copy:
        # a new thread is on the first device, where pinning memory would begin a context of this process
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            tensors = self.to_device(batch, self.device)
            arrived = torch.cuda.Event()
            arrived.record(self.stream)
        return Copy(tensors, arrived, self.device)

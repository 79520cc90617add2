"""The micro-batches of one rank: which rows they hold, collated on the host ahead of time, then moved to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from terakoya.components import Batch, Objective
from terakoya.components.rows import Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.rows.loader import fill_up
from terakoya.rows.row_source import RowSource
from terakoya.toolkit.architectures.attention import DOCUMENT_SIZES, boundary_arrays
from terakoya.training.run_plan import RunPlan


@dataclass(frozen=True)
class Copy:
    """The tensors of one micro-batch, on their way to a GPU.

    Attributes:
        tensors: on the `device`, filled by copies on a stream of their own.
        arrived: an event of that stream after the copies.
    """

    tensors: dict[str, Tensor]
    arrived: Any
    device: torch.device

    def take(self) -> dict[str, Tensor]:
        """Returns the tensors for use on the current stream, which waits for them; the host does not."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.arrived)
        for tensor in self.tensors.values():
            tensor.record_stream(stream)  # else the copying stream would write into memory that is still read
        return self.tensors


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches that one rank runs in one optimizer step.

    Attributes:
        real: the rank's micro-batches, at most `rank_batch.micro_steps` of them.
        dummy: one row that counts nothing, for the micro-steps in which only other ranks have rows; None where there
            are no such micro-steps.
        copies: the first of `real` on their way to the device, where they are copied ahead.
    """

    real: list[Batch]
    dummy: Batch | None
    copies: Sequence[Copy] = ()


class BatchMaker:
    """Makes this rank's `StepBatches` from the number of a step: a pure function, which a thread calls ahead."""

    def __init__(self, plan: RunPlan, vocabulary: Vocabulary, *, flash: bool = False, compiled: bool = False) -> None:
        """With `flash` batches have the arrays of that backend. Where the model is `compiled`, rows of padding fill up
        a micro-batch that would be shorter than those of every step, so that it has their shapes."""
        self.plan = plan
        self.loader = plan.loader
        self.vocabulary = vocabulary
        self.flash = flash
        self.compiled = compiled

    def describe_rows(self, start: int, stop: int) -> str:
        """Returns which rows [start, stop) of the order are: their numbers there, and in the orders of their stores."""
        before, after = self.loader.store_positions(start), self.loader.store_positions(stop)
        parts = [
            f"{first['rows']:,} to {int(last['rows']) - 1:,} of {first['store']}"
            for first, last in zip(before, after, strict=True)
            if first["rows"] != last["rows"]
        ]
        return f"rows {start:,} to {stop - 1:,} of the training order ({', '.join(parts)})"

    def __call__(self, step: int) -> StepBatches:
        """Returns the micro-batches of optimizer step `step`, counted from 0."""
        progress, rank_batch = self.plan.objective_progress(step), self.plan.phase_at(step).rank_batch
        first, last = self.plan.rows(step)
        real = [
            self._collate(replace(self.loader.load(first + start, min(first + stop, last)), progress=progress), step)
            for start, stop in rank_batch.micro_batches()
            if first + start < last
        ]
        return StepBatches(real, self.dummy(step) if len(real) < rank_batch.micro_steps else None)

    def dummy(self, step: int = 0) -> Batch:
        """Returns a batch of one row with nothing to learn, of the rows that `step` has."""
        return self._collate(self.loader.mixture_at(self.plan.rows(step)[0])[0][0].blank_row(), step)

    def to_device(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Returns the tensors of `batch` on `device`, as `to_device` does for this model."""
        return to_device(batch, device, flash=self.flash, compiled=self.compiled)

    def _collate(self, rows: Rows, step: int) -> Batch:
        """Returns the micro-batch of `rows`, which belong to `step`."""
        phase = self.plan.phase_at(step)
        sizes = sorted({stop - start for start, stop in phase.rank_batch.micro_batches()}) or [1]
        size = next(each for each in sizes if each >= len(rows)) if self.compiled else len(rows)
        source = self.loader.mixture_at(self.plan.rows(step)[0])[0][0]
        batch = collate_rows(phase.objective, self.vocabulary, rows, size, source)
        if not self.flash:
            return batch
        return Batch({**batch.arrays, **boundary_arrays(batch.arrays["document_ids"])}, batch.counts)


def collate_rows(objective: Objective, vocabulary: Vocabulary, rows: Rows, size: int, source: RowSource) -> Batch:
    """Returns the micro-batch of `rows` with the shapes of `size` rows and the counts of its own: rows beyond its own
    are padding alone. `source` is one that the rows may come from."""
    batch = objective.collate(rows, vocabulary)
    if len(rows) >= size:
        return batch
    return Batch(objective.collate(fill_up(rows, size, source), vocabulary).arrays, batch.counts)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns `tensor`, which is on the host, on `device`. The host does not wait for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_device(batch: Batch, device: torch.device, *, flash: bool, compiled: bool = False) -> dict[str, Tensor]:
    """Returns the tensors of `batch` on `device`, copied without waiting; with `flash` also that backend's. For a
    `compiled` model, the sizes that depend on documents are marked: its graphs then take any number there."""
    arrays = dict(batch.arrays)
    if flash and "cu_seqlens" not in arrays:
        arrays |= boundary_arrays(arrays["document_ids"])
    tensors = {name: copy_to_device(torch.from_numpy(array), device) for name, array in arrays.items()}
    if compiled:
        from torch._dynamo import mark_dynamic

        for name in DOCUMENT_SIZES & tensors.keys():
            mark_dynamic(tensors[name], 0)
    return tensors

"""Gradient norm and loss of the last steps, by which steps are skipped, counted and found to be spikes.

They stay on the device until the step after is under way, so that no step waits for its numbers. Norms are the same on
all ranks; this rank's part of a loss is added to those of the others in the vote on a later step, as an integer, whose
sum does not depend on the order. What a step is therefore depends on the steps before it alone, and is decided on all
ranks alike, before the second step after it.

See docs/design/spikes.md.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terakoya.components.run import StepAnomaly
from terakoya.errors import Diverged, UserError
from terakoya.log import plural
from terakoya.rows.named_documents import describe_documents, documents_by_store
from terakoya.training.batches import BatchMaker
from terakoya.training.engines.engine import may_update
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.loss import Meter
from terakoya.training.run import Run
from terakoya.training.watches import find_watch

LOSS_UNIT = 2.0**-24
"""What 1 stands for in a vote's losses. With parts up to `LARGEST_PART` the sum of 32,768 ranks fits into 63 bits."""
LARGEST_PART = 2.0**24
LOGGED_DOCUMENTS = 1000
"""How many documents of each store a record lists at most."""


@dataclass
class PendingStep:
    """A step that has not been judged yet.

    Attributes:
        step: its number, counted from 1.
        rows: its rows [start, stop) of the training order.
        loss: this rank's part of its loss, in `LOSS_UNIT`; `loss` and `grad_norm` are known once it was read.
        left_out: whether its update was left out because the gradient norm was above `skip_above`.
        skip_above: the norm above which the update was left out.
        counts: the global counts of its losses.
        numbers: its gradient norm and this rank's sum of each loss, float64, on their way to the host; None once read.
        arrived: after this event `numbers` are there; None on the CPU, where they are there at once.
    """

    step: int
    rows: tuple[int, int]
    loss: int = 0
    grad_norm: float = math.nan
    left_out: bool = False
    skip_above: float = math.inf
    counts: Mapping[str, int] | None = None
    numbers: Tensor | None = None
    arrived: torch.cuda.Event | None = None


class StepJudge:
    """Judges the steps of a run in their order, a function of their losses and norms alone; this one finds nothing. One
    that `goes_back` may raise `DecidedRollback`."""

    goes_back = False

    def skip_above(self, step: int) -> float:
        """Returns the gradient norm above which the update of the coming `step` is left out."""
        return math.inf

    def judge(self, health: StepHealth, step: PendingStep, loss: float) -> None:
        """Judges a `step` by its global `loss` and its norm, which may not be finite; notes by `health` what it finds.
        Raises DecidedRollback if the run goes back."""

    def first_open_step(self) -> int | None:
        """Returns the first step because of which the run may go back, among those that were judged."""
        return None

    def state(self) -> Any:
        """Returns the whole state, as JSON values."""

    def load(self, state: Any) -> None:
        """Restores a `state` that is not None."""


def wait_for_device(event: torch.cuda.Event) -> None:
    """Waits until the device has reached `event`. Ranks whose device hangs are found here, by this name."""
    event.synchronize()


class StepHealth:
    """Follows the steps of a run; on every rank alike.

    Attributes:
        step_meter: the sums of the step under way.
        pending: steps that are not judged yet, oldest first.
        spikes: what judges the steps.
        consecutive: steps in a row, up to the last one read, that were not finite.
        skipped: steps of the run that were skipped.
        anomalies: what was found since `take_anomalies`.
    """

    def __init__(self, run: Run, meter: Meter, scaler: LossScaler | None, batches: BatchMaker) -> None:
        """`meter` gets the sums of every step that counts."""
        parameters = run.parameters
        self.run = run
        self.meter = meter
        self.scaler = scaler
        self.run_log = run.run_log
        self.batches = batches
        self.terms = {name: term for name, term in meter.terms.items() if term.weight is not None}
        self.step_meter = Meter(meter.terms, run.device)
        self.pending: deque[PendingStep] = deque()
        self.allowed = parameters.max_consecutive_skipped_steps
        self.spikes = find_watch("spikes", run, batches, StepJudge)
        self.consecutive = self.skipped = self.overflows = 0
        self.error: Diverged | None = None
        self.anomalies: list[StepAnomaly] = []

    # ------------------------------------------------------------------------------------------------- in a step

    def skip_above(self) -> float:
        """Returns the gradient norm above which the coming step is left out."""
        return self.spikes.skip_above(self.run.step + 1)

    def add(self, norm: Tensor, skip_above: float, counts: Mapping[str, int], rows: tuple[int, int]) -> None:
        """Adds the step that has just ended; never waits for the device.

        Its sums go to the meter unless they are not finite. In fp16 they do in any case: there gradients that overflow
        are usual, and the loss is sound. `norm` is a float32 scalar on the device; see `PendingStep`.
        """
        sums = [self.step_meter.sums[name] for name in self.terms]
        numbers = torch.stack([norm.double(), *sums]).to("cpu", non_blocking=True)
        arrived = None
        if norm.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self.meter.take_step(self.step_meter, where=may_update(norm) if self.scaler is None else None)
        self.meter.add_counts(counts)
        self.pending.append(
            PendingStep(self.run.step, rows, skip_above=skip_above, counts=counts, numbers=numbers, arrived=arrived)
        )

    def losses(self, finished_steps: int) -> list[int]:
        """Returns this rank's part of the losses that travel with the vote on the step after `finished_steps`: of the
        pending steps but the last of those, which may still be running."""
        return [self._read(each).loss for each in self.pending if each.step < finished_steps]

    # ----------------------------------------------------------------------------------------------- on the host

    def judge(self, losses: Sequence[int]) -> None:
        """Judges the oldest pending steps, whose global `losses` are known.

        Raises:
            Diverged: too many steps in a row were not finite.
            DecidedRollback: the run goes back.
        """
        for loss in losses:
            self.spikes.judge(self, self._read(self.pending.popleft()), loss * LOSS_UNIT)
        self._raise_error()

    def first_open_step(self) -> int:
        """Returns the first step because of which the run may go back, by a judgement yet to come."""
        return self.spikes.first_open_step() or (self.pending[0].step if self.pending else self.run.step + 1)

    def check(self) -> None:
        """Reads all steps so far, before their save or when they are logged. Raises Diverged if too many steps in a row
        were not finite, or in fp16 the loss scale is already at its minimum."""
        for each in self.pending:
            self._read(each)
        if self.scaler is not None:
            if self.overflows:
                scale = f"loss scale {float(self.scaler.scale):,.10g}"
                self.run_log.print(
                    f"step {self.run.step:,}: {self.overflows} step{plural(self.overflows)} skipped, as gradients "
                    f"overflowed fp16; {scale}"
                )
            self.overflows = 0
            self.scaler.raise_if_stuck(self.run.step)
        self._raise_error()

    def log_values(self) -> dict[str, float]:
        """Returns the values to log: the norm of the last step; in fp16 also the loss scale and the skipped steps."""
        for each in self.pending:
            self._read(each)
        return {"grad_norm": self.pending[-1].grad_norm, **(self.scaler.log_values() if self.scaler else {})}

    def take_anomalies(self) -> tuple[StepAnomaly, ...]:
        """Returns what was found since the last call."""
        taken, self.anomalies = tuple(self.anomalies), []
        return taken

    def _read(self, step: PendingStep) -> PendingStep:
        """Waits for the numbers of `step`, and counts it where it is not finite; returns it."""
        if step.numbers is None:
            return step
        if step.arrived is not None:
            wait_for_device(step.arrived)
        step.grad_norm, *sums = step.numbers.tolist()
        step.numbers = step.arrived = None
        assert step.counts is not None
        part = 0.0
        for (_, term), total in zip(self.terms.items(), sums, strict=True):
            part += (term.weight or 0.0) * total / step.counts[term.count] if step.counts[term.count] else 0.0
        if math.isfinite(part):
            step.loss = round(max(-LARGEST_PART, min(part, LARGEST_PART)) / LOSS_UNIT)
        step.left_out = math.isfinite(step.grad_norm) and step.grad_norm > step.skip_above
        if math.isfinite(step.grad_norm):
            self.consecutive = 0
            self.skipped += step.left_out
        else:
            self.consecutive += 1
            self.skipped += 1
            self._note_skipped(step)
        return step

    def _note_skipped(self, step: PendingStep) -> None:
        if self.scaler is not None:
            self.overflows += 1
            self.note(step, "skipped", "gradients overflowed fp16; no weight has changed", reason="overflow")
            return
        assert step.counts is not None
        self.meter.add_counts({name: -count for name, count in step.counts.items()})  # its sums were not added
        rows, documents = self.describe(step)
        text = f"loss or gradients are not finite, and no weight has changed; it took {rows}"
        self.note(step, "skipped", text, reason="not finite", **documents)
        if self.consecutive <= self.allowed:
            self.run_log.print(
                f"warning: step {step.step:,}: {text}. {self.consecutive} in a row; max_consecutive_skipped_steps is "
                f"{self.allowed}"
            )
        elif self.error is None:
            first = step.step - self.consecutive + 1
            self.error = Diverged(
                f"step {step.step:,}: loss or gradients were not finite in {self.consecutive} "
                f"step{plural(self.consecutive)} in a row, and max_consecutive_skipped_steps is {self.allowed}; "
                "such steps leave weights and moments unchanged. "
                f"Lower optimizer.learning_rate, or look at {rows}, which it took; "
                f'"data": {{"skip_steps": [[{first}, {step.step}]]}} passes over such rows'
            )

    def describe(self, step: PendingStep) -> tuple[str, dict[str, Any]]:
        """Returns which rows `step` took and, on rank 0, of which documents; these also as values for its record."""
        rows = self.batches.describe_rows(*step.rows)
        if self.run_log.active:
            with contextlib.suppress(UserError):  # a store that is damaged is reported where its rows are read
                found = documents_by_store(self.batches.loader, *step.rows)
                listed = {str(store.folder): numbers[:LOGGED_DOCUMENTS].tolist() for store, numbers in found}
                return f"{rows}, which hold {describe_documents(found)}", {"documents": listed}
        return rows, {}

    def note(self, step: PendingStep, kind: Any, text: str, **values: Any) -> None:
        """Records what was found in `step`, and tells the next report of it."""
        self.anomalies.append(StepAnomaly(step.step, kind, text))
        self.run_log.write(kind, step=step.step, **values, rows=step.rows, text=text)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    # --------------------------------------------------------------------------------------------- checkpoints

    def state(self, losses: Sequence[int]) -> dict[str, Any]:
        """Returns the state after `check`, as JSON values; `losses` are the global losses of all pending steps."""
        return {
            "consecutive": self.consecutive,
            "skipped": self.skipped,
            "spikes": self.spikes.state(),
            "pending": [
                {
                    "step": each.step,
                    "rows": each.rows,
                    "loss": loss,
                    "grad_norm": each.grad_norm if math.isfinite(each.grad_norm) else None,
                    "skip_above": each.skip_above if math.isfinite(each.skip_above) else None,
                }
                for each, loss in zip(self.pending, losses, strict=True)
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`. Rank 0 takes the losses of the pending steps whole."""
        self.consecutive, self.skipped = state["consecutive"], state["skipped"]
        if state["spikes"] is not None:
            self.spikes.load(state["spikes"])
        for each in state["pending"]:
            norm = math.nan if each["grad_norm"] is None else each["grad_norm"]
            limit = math.inf if each["skip_above"] is None else each["skip_above"]
            loss = each["loss"] if self.run.rank == 0 else 0
            rows = (each["rows"][0], each["rows"][1])
            self.pending.append(PendingStep(each["step"], rows, loss, norm, norm > limit, limit))

"""How fast steps are, seen in a few steps of a trainer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from terakoya.components import Batch
from terakoya.rows.loader import Prefetcher
from terakoya.training.trainer import Trainer

LEAST_STEPS, MOST_STEPS = 3, 50
"""How many steps are timed: the fewest have a median, the most are enough for any."""


@dataclass(frozen=True)
class StepRate:
    """Seconds that the slowest process needs.

    Attributes:
        micro_step: forward and backward of one micro-batch, its rows read ahead.
        update: what a step adds to its micro-steps: gradients are reduced over ranks and clipped, weights updated.
        evaluation: forward of one micro-batch in a validation.
    """

    micro_step: float
    update: float
    evaluation: float

    def step(self, micro_steps: int) -> float:
        """Returns the seconds of an optimizer step of so many micro-steps."""
        return micro_steps * self.micro_step + self.update


class _TimedEngine:
    """An engine whose parts of a step are timed, each until the device has finished it."""

    def __init__(self, engine: Any, device: torch.device, now: Callable[[], float]) -> None:
        self._engine, self._device, self._now = engine, device, now
        self.first_parts: list[float] = []
        self.last_parts: list[float] = []
        self.updates: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: Any, *, last: bool) -> Any:
        parts = self.last_parts if last else self.first_parts
        return self.time(parts, lambda: self._engine.micro_step(batch, loss_fn, last=last))

    def step(self, *given: Any, **named: Any) -> Any:
        return self.time(self.updates, lambda: self._engine.step(*given, **named))

    def time(self, parts: list[float], work: Callable[[], Any]) -> Any:
        """Returns what `work` returns, and adds its seconds to `parts`."""
        began = self.wait()
        result = work()
        parts.append(self.wait() - began)
        return result

    def wait(self) -> float:
        """Waits for the device; returns the time then."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()


def time_steps(
    trainer: Trainer, *, seconds: float, most: int = MOST_STEPS, now: Callable[[], float] = time.perf_counter
) -> StepRate:
    """Takes steps of `trainer` for about `seconds` of the clock `now`, at least `LEAST_STEPS` and at most `most`, and
    returns the medians of the slowest rank. Weights and the trainer's step change. Collective.

    The first step of a process is slower than all others: take one before.
    """
    timed = _TimedEngine(trainer.engine, trainer.run.device, now)
    trainer.engine, engine = timed, trainer.engine  # all else is the engine's
    wholes: list[float] = []
    micro_steps = trainer.plan.phase_at(trainer.run.step).rank_batch.micro_steps
    began = timed.wait()
    try:
        with Prefetcher(trainer.micro_steps.read_step, trainer.run.step, ahead=2) as prefetcher:
            while trainer.context.broadcast(
                len(wholes) < min(LEAST_STEPS, most) or (timed.wait() - began < seconds and len(wholes) < most)
            ):
                step_began = timed.wait()
                batches = next(prefetcher)
                trainer.one_step(batches)
                wholes.append(timed.wait() - step_began)
        evaluation = _time_evaluation(trainer, batches.real[0] if batches.real else trainer.batches.dummy(), timed)
    finally:
        trainer.engine = engine
    last, update = statistics.median(timed.last_parts), statistics.median(timed.updates)
    micro_step = (statistics.median(wholes) - update) / micro_steps
    if timed.first_parts:  # the last micro-step also reduces gradients, which belongs to the step
        reduction = max(0.0, last - statistics.median(timed.first_parts))
        micro_step -= reduction / micro_steps
        update += reduction
    ranks = trainer.context.gather((micro_step, update, evaluation))
    slowest = max(ranks, key=lambda each: each[0] + each[1])
    return StepRate(slowest[0], slowest[1], max(each[2] for each in ranks))


def _time_evaluation(trainer: Trainer, batch: Batch, timed: _TimedEngine) -> float:
    """Returns the seconds of the forward of `batch` in a validation, the faster of two: the first one may compile."""
    taken: list[float] = []
    trainer.engine.module.eval()
    for _ in range(2):
        tensors = trainer.batches.to_device(batch, trainer.run.device)
        timed.time(taken, partial(trainer.engine.evaluate, tensors))
    trainer.engine.module.train()
    return min(taken)

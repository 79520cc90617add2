"""Keeps an exponential moving average of the weights next to training: `terakoya export RUN --weights ema`.

After each step, average = decay x average + (1 - decay) x weights (Polyak and Juditsky, 1992). The first averages
forget faster, at most (1 + n) / (10 + n) in the nth update, as those of TensorFlow's ExponentialMovingAverage do, so
that weights from before training do not linger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import EventListener, EventPlugin, TensorShard
from terakoya.components.event import SavedTensors
from terakoya.components.run import Run, StepReport

if TYPE_CHECKING:
    from torch import Tensor


class Ema(EventPlugin):
    """Keeps an exponential moving average of the weights, on the processes that keep the weights, and in checkpoints;
    `terakoya export RUN --weights ema` writes it as a model."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """The share of the average that stays in each update; 0.999 looks back about 1,000 updates."""
    every: PositiveInt = 1
    """Steps between two updates of the average. Unit: optimizer steps."""
    from_step: NonNegativeInt = 0
    """The step after which the average begins, with the weights of that step. Unit: optimizer steps."""
    warmup: bool = True
    """Whether the first updates forget faster: the decay of the nth is at most (1 + n) / (10 + n)."""

    def count_bytes(self, trained: int) -> int:
        return 4 * trained

    def start(self, run: Run) -> EventListener:
        return _Listener(self, run)


class _Listener(EventListener):
    """The average of the weights that this process keeps.

    Attributes:
        weights: these weights, on one process each.
        averages: one for each of them; without elements before `from_step`.
        updates: how often they were updated.
        begun: whether the average has begun, here and on the other processes.
    """

    def __init__(self, settings: Ema, run: Run) -> None:
        self.settings = settings
        self.run = run
        self.updates = 0
        self.begun = False
        self.weights = run.weight_shards()
        self.averages: list[Tensor] = []

    def run_started(self, run: Run) -> None:
        self._begin(run.step)

    def step_finished(self, run: Run, report: StepReport) -> None:
        import torch

        if not self.begun:
            self._begin(report.step)
        elif report.step % self.settings.every == 0:
            self.updates += 1
            decay = self.settings.decay
            if self.settings.warmup:
                decay = min(decay, (1 + self.updates) / (10 + self.updates))
            if self.averages:
                with torch.no_grad():
                    torch._foreach_lerp_(self.averages, [each.value for each in self.weights], 1.0 - decay)

    def _begin(self, step: int) -> None:
        """Begins the average with the weights of `step`, unless there is one, or `step` is before its first."""
        if not self.begun and step >= self.settings.from_step:
            self.begun = True
            self.averages = [each.value.clone() for each in self.weights]

    def state(self) -> Any:
        return {"updates": self.updates}

    def load(self, state: Any) -> None:
        self.updates = state["updates"]

    def shards(self) -> Sequence[TensorShard]:
        return [replace(each, value=average) for each, average in zip(self.weights, self.averages, strict=self.begun)]

    def load_tensors(self, tensors: SavedTensors) -> None:
        if not tensors:
            return
        new = dict.fromkeys(each.name for each in self.weights if each.name not in tensors)
        if new:
            self.run.warn(
                f"ema: {', '.join(list(new)[:3])} was not trained before; its average begins with its value now"
            )
        self.begun = True
        self.averages = [
            tensors.at(each).to(each.value.device, copy=True) if each.name in tensors else each.value.clone()
            for each in self.weights
        ]


@hookimpl
def register_events() -> dict[str, type[EventPlugin]]:
    return {"ema": Ema}

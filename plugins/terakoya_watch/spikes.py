"""Finds spikes of the loss and of the gradient norm: values far above those of the steps before.

A value is a spike if it is `threshold` robust standard deviations above the median of the last steps, and also clearly
above every value in the window. The deviation is estimated from the differences of neighbouring steps (their median
absolute value), so that a loss that falls does not widen it; norms, which vary by factors, are compared as logarithms.
Spikes enter the window, too: a level that stays is no spike. Whether the loss stays above the limit of a spike is
followed apart from that.

See docs/design/spikes.md.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from terakoya.config.spikes import Spikes

Signal = Literal["loss", "grad_norm"]

LEVEL_STEPS = 16
"""The last steps whose median is the level; with fewer steps, only `FIRST_FACTOR` applies."""
FIRST_FACTOR = 4.0
"""The multiple of all losses before that is a spike in a run's first steps."""
FACTORS: Mapping[Signal, float] = {"loss": 1.25, "grad_norm": 2.0}
"""The multiple of every value in the window that a spike exceeds."""
DEVIATION = 1.4826 / math.sqrt(2)
"""Turns the median absolute difference of two normally distributed values into their standard deviation."""
SMALLEST = 1e-30
"""A norm below it counts as this norm, so that it has a logarithm."""


@dataclass(frozen=True)
class Spike:
    """A value that is a spike, the usual `level`, and the `limit` that it exceeds."""

    signal: Signal
    value: float
    level: float
    limit: float


@dataclass(frozen=True)
class LastingSpike:
    """A spike of the loss after which no loss was below its limit.

    Attributes:
        step: the step of the spike, counted from 1.
        value, level, limit: see `Spike`.
        steps: how many steps there were since, that of the spike included.
    """

    step: int
    value: float
    level: float
    limit: float
    steps: int = 1


class Window:
    """The last values of one signal: those of finite steps, oldest first."""

    def __init__(self, signal: Signal, settings: Spikes) -> None:
        self.signal: Signal = signal
        self.threshold = settings.threshold
        self.values: deque[float] = deque(maxlen=settings.window)

    def add(self, value: float) -> Spike | None:
        """Adds a step's `value`; returns it as a spike if it is one."""
        spike = None
        if self.values and value > max(self.values) and value > (limit := self.limit()):
            spike = Spike(self.signal, value, self.level(), limit)
        self.values.append(value)
        return spike

    def level(self) -> float:
        """The median of the last values."""
        return statistics.median(list(self.values)[-LEVEL_STEPS:])

    def limit(self) -> float:
        """The value above which the next one is a spike; infinite where too few are known."""
        if len(self.values) < LEVEL_STEPS:
            return FIRST_FACTOR * max(self.values) if self.values and self.signal == "loss" else math.inf
        is_norm = self.signal == "grad_norm"
        values = [math.log(max(value, SMALLEST)) for value in self.values] if is_norm else list(self.values)
        steps = [abs(after - before) for before, after in pairwise(values)]
        limit = statistics.median(values[-LEVEL_STEPS:]) + self.threshold * DEVIATION * statistics.median(steps)
        if is_norm:
            limit = math.exp(min(limit, 700.0))  # exp of more is infinite
        return max(limit, FACTORS[self.signal] * max(self.values))


class SpikeDetector:
    """Judges the steps of a run in their order: a pure function of their losses and norms.

    A new data stage may have another level, so it begins with empty windows.

    Attributes:
        stage_starts: steps, counted from 1, with which a data stage begins.
        last_step: the last step that was judged.
        lasting: the spike of the loss that has lasted up to that step; None where there is none.
    """

    def __init__(self, settings: Spikes, stage_starts: Sequence[int] = ()) -> None:
        self.stage_starts = stage_starts
        self.loss, self.grad_norm = Window("loss", settings), Window("grad_norm", settings)
        self.last_step = 0
        self.lasting: LastingSpike | None = None

    def add(self, step: int, *, loss: float, grad_norm: float) -> list[Spike]:
        """Adds the finite numbers of `step` and returns its spikes."""
        if any(self.last_step < start <= step for start in self.stage_starts):
            self.loss.values.clear()
            self.grad_norm.values.clear()
            self.lasting = None
        self.last_step = step
        of_loss, of_norm = self.loss.add(loss), self.grad_norm.add(grad_norm)
        if self.lasting is not None and loss > self.lasting.limit:
            self.lasting = replace(self.lasting, steps=self.lasting.steps + 1)
        else:
            self.lasting = None
        if self.lasting is None and of_loss is not None:
            self.lasting = LastingSpike(step, of_loss.value, of_loss.level, of_loss.limit)
        return [spike for spike in (of_loss, of_norm) if spike is not None]

    def add_not_finite(self) -> None:
        """Adds a step whose loss or gradients are not finite: a spike before it lasts."""
        if self.lasting is not None:
            self.lasting = replace(self.lasting, steps=self.lasting.steps + 1)

    def norm_limit(self, step: int) -> float:
        """The gradient norm above which the coming `step` is a spike, by the steps judged so far."""
        if any(self.last_step < start <= step for start in self.stage_starts):
            return math.inf
        return self.grad_norm.limit()

    def state(self) -> dict[str, Any]:
        """The whole state, as JSON values."""
        return {
            "last_step": self.last_step,
            "loss": list(self.loss.values),
            "grad_norm": list(self.grad_norm.values),
            "lasting": self.lasting and asdict(self.lasting),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`; a window that has become smaller keeps its newest values."""
        self.last_step = state["last_step"]
        self.loss.values.extend(state["loss"])
        self.grad_norm.values.extend(state["grad_norm"])
        lasting = state.get("lasting")
        self.lasting = lasting and LastingSpike(**lasting)

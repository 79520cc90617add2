"""How long the steps of this rank take before they wait for other ranks, and whether its GPU waits for the host.
Nothing here waits for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FEWEST_STEPS = 5
"""Steps of which a share is worth saying."""
MOST_WAITS = 0.9
"""The share of steps from which on the host is what limits a run."""


class StepClock:
    """Adds up the time from `begin` to `end`: on a GPU between two events of its stream, read once both have happened.
    `done` says how many pieces of work have ended, and the seconds of them all: one value, which another thread may
    read.

    The second of them is the one behind the forward pass. A GPU that is slower than its host has not reached it when
    the backward pass and the update have been started, too; one that has, waits for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.done = (0, 0.0)
        self._beside = 0.0
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._events: deque[tuple[Any, Any]] = deque()
        self._steps, self._waits = -1, 0

    def begin(self) -> None:
        """Begins a piece of work."""
        self._began = now(on_gpu=self._on_gpu)
        while self._events and self._events[0][1].query():
            began, ended = self._events.popleft()
            self._add(began.elapsed_time(ended) / 1000)

    def end(self) -> None:
        """Ends the piece of work that was begun last, once."""
        if self._began is None:
            return
        if self._on_gpu:
            self._ended = now(on_gpu=self._on_gpu)
            self._events.append((self._began, self._ended))
        else:
            self._add(time.perf_counter() - self._began)
        self._began = None

    def measure(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which keeps this process busy and not the device: part of the next piece."""
        began = time.perf_counter()
        result = work()
        self._beside += time.perf_counter() - began
        return result

    def until_loss(self, loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns `loss_fn`, which then also ends the work: the backward pass that follows meets the other ranks."""

        def with_end(*arguments: Any, **options: Any) -> Tensor:
            loss = loss_fn(*arguments, **options)
            self.end()
            return loss

        return with_end

    def step_started(self) -> None:
        """Looks how far the GPU is, once the host has started all of a step. Does not wait for it."""
        if self._ended is not None:
            self._waits += self._steps >= 0 and self._ended.query()
            self._steps += 1
            self._ended = None

    def take_waits(self) -> float | None:
        """Returns the share of the steps since the last call, but the first, for which the host has waited, in which
        the GPU had no work left; None where too few are known."""
        steps, waits = self._steps, self._waits
        self._steps, self._waits = -1, 0
        return waits / steps if steps >= FEWEST_STEPS else None

    def _add(self, seconds: float) -> None:
        pieces, before = self.done
        self.done = (pieces + 1, before + seconds + self._beside)
        self._beside = 0.0


def now(*, on_gpu: bool) -> Any:
    """Returns the time, or an event that the GPU records when it is there."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

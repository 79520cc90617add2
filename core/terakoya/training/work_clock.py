"""How long the steps of this rank take before they wait for other ranks, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class WorkClock:
    """Adds up the time from `begin` to `end`: on a GPU between two events of its stream, read once both have happened.

    Attributes:
        done: how many pieces of work have ended, and the seconds of them all: one value, which another thread may read.
    """

    def __init__(self, device: torch.device) -> None:
        self.done = (0, 0.0)
        self._beside = 0.0
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._events: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        """Begins a piece of work."""
        self._began = self._now()
        while self._events and self._events[0][1].query():
            began, ended = self._events.popleft()
            self._add(began.elapsed_time(ended) / 1000)

    def end(self) -> None:
        """Ends the piece of work that was begun last, once."""
        if self._began is None:
            return
        if self._on_gpu:
            self._events.append((self._began, self._now()))
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

    def _add(self, seconds: float) -> None:
        pieces, before = self.done
        self.done = (pieces + 1, before + seconds + self._beside)
        self._beside = 0.0

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

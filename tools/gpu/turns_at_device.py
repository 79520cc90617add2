"""Runs that take turns at one device: warmed up together, then timed window by window, one at a time.

What a run sets up or leaves in memory is no other's, so each has a process of its own. In the last window's end it is
over: a contestant's process ends there, and a run in this process by `Enough`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from processes import Beside

WINDOWS = 3
WARM_UP = 8
"""The most steps before the first window."""
COMPILED_BY = 3
"""After this many steps nothing should be compiled any more."""
MOST_BESIDE, LEAST_BESIDE = 0.2, 0.1
"""The share of a core that those which wait may use while another one is timed, and seconds that say nothing: a run
reads rows ahead, and a compiler uses a whole core."""


class Enough(Exception):  # noqa: N818 - nothing went wrong
    """Ends a run whose windows are measured."""


class Clock:
    """Measures the seconds of windows of optimizer steps; waits for the device at their borders only.

    Attributes:
        seconds: those of each window so far.
        at_border: what is called before each window and after the last.
        graphs: how many graphs were compiled in the first `COMPILED_BY` steps, or in the warm-up if that is shorter.
    """

    def __init__(self, window: int, at_border: Callable[[], None] | None = None) -> None:
        self.window = window
        self.warm_up = max(1, min(WARM_UP, window * 2 // 5))
        self.at_border = at_border or self._leave_at_the_end
        self.ended = self.graphs = 0
        self.seconds: list[float] = []
        self._start = 0.0
        self._compiled_before = compile_seconds()

    @property
    def steps(self) -> int:
        """Optimizer steps to take."""
        return self.warm_up + WINDOWS * self.window

    @property
    def done(self) -> bool:
        """Whether all windows are measured."""
        return len(self.seconds) == WINDOWS

    def step_ended(self) -> None:
        """Notes that a step has ended."""
        self.ended += 1
        if self.ended == min(COMPILED_BY, self.warm_up):
            self.graphs = graph_count()
        if self.done or self.ended < self.warm_up or (self.ended - self.warm_up) % self.window:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.ended > self.warm_up:
            self.seconds.append(time.perf_counter() - self._start)
        self.at_border()
        self._start = time.perf_counter()

    def of_windows(self, steps: list[int]) -> list[int]:
        """Returns the sums of `steps`, numbers of each step from the first on, over each window."""
        return [sum(steps[start : start + self.window]) for start in range(self.warm_up, self.steps, self.window)]

    def facts(self) -> dict[str, Any]:
        """Returns the memory that tensors took at most, and the compiler's work in this process."""
        held = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {
            "gigabytes": held / 1e9, "compile_seconds": compile_seconds() - self._compiled_before,
            "recompiled": graph_count() - self.graphs,
        }  # fmt: skip

    def _leave_at_the_end(self) -> None:
        if self.done:
            raise Enough


def graph_count() -> int:
    """Returns how many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def compile_seconds() -> float:
    """Returns how long torch has compiled in this process."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent()["total_wall_time"])


class Contestant(Protocol):
    """A run that is measured; it can be pickled."""

    @property
    def window(self) -> int:
        """Optimizer steps between two readings of the clock."""

    def train(self, clock: Clock) -> None:
        """Trains for `clock.steps` steps, and tells the clock of each; or until the clock says `Enough`."""

    def facts(self, clock: Clock) -> dict[str, Any]:
        """Returns what is known of the run, in its process, once the clock is done."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run: seconds of its windows and its facts, or an error."""

    seconds: list[float] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def take_turns(
    contestants: Mapping[str, Contestant], *, apart: bool, warm_seconds: float
) -> Iterator[tuple[str, Outcome]]:
    """Yields the outcome of each contestant, the first one first. One that fails, or takes longer to warm up, is ended
    with all that it has started before any other one is timed.

    Args:
        apart: whether each trains in a process of its own, and they take turns; otherwise one after another, in this.
        warm_seconds: how long all of them may take to warm up.
    """
    if not apart:
        for name, contestant in contestants.items():
            yield name, alone(contestant)
        return
    ready_by = time.monotonic() + warm_seconds
    with contextlib.ExitStack() as held:
        running = {name: Beside(_serve, contestant) for name, contestant in contestants.items()}
        for each in running.values():
            held.callback(each.end)
        for window in range(WINDOWS + 1):
            for name, process in list(running.items()):
                others = [other for other in running.values() if other is not process]
                outcome = _warm(process, ready_by) if window == 0 else _window(process, others)
                if outcome is not None:
                    running.pop(name).end()
                    yield name, outcome


def alone(contestant: Contestant) -> Outcome:
    """Returns the outcome of a run in this process."""
    forget_runs()
    clock = Clock(contestant.window)
    try:
        with contextlib.suppress(Enough):
            contestant.train(clock)
    except Exception as raised:  # noqa: BLE001 - what fails is a measurement, too, and others follow
        return Outcome(error=describe(raised))
    return Outcome(clock.seconds, contestant.facts(clock))


def forget_runs() -> None:
    """Frees what earlier runs have left in this process, and what was compiled for them."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def describe(error: BaseException) -> str:
    """Returns the error's class and the beginning of what it says."""
    return f"{type(error).__name__}: {error}"[:500]


def _warm(process: Beside, ready_by: float) -> Outcome | None:
    """Lets a run warm up; returns its outcome where it is over."""
    try:
        answer: Outcome | None = process.answer(max(0.0, ready_by - time.monotonic()))
    except TimeoutError:
        return Outcome(error="still warming up when the time for that was over")
    except EOFError:
        return Outcome(error="its process ended without a word")
    return answer


def _window(process: Beside, others: Sequence[Beside]) -> Outcome | None:
    """Lets a run measure a window; returns its outcome where it is over. A window beside which `others` have computed
    says nothing of the run, whose outcome is then an error."""
    start, before = time.monotonic(), sum(each.cpu_seconds() for each in others)
    try:
        process.pipe.send(None)
        answer: Outcome | None = process.answer(None)
    except (EOFError, OSError):
        return Outcome(error="its process ended without a word")
    seconds, busy = time.monotonic() - start, sum(each.cpu_seconds() for each in others) - before
    if busy > max(LEAST_BESIDE, MOST_BESIDE * seconds):
        return Outcome(error=f"not timed: others computed for {busy:.2f} s in a window of {seconds:.2f} s")
    return answer


def _serve(contestant: Contestant, pipe: Connection) -> None:
    """Trains in this process: sends None when it is ready for its next window, and its outcome at the end."""

    def wait_for_turn() -> None:
        if clock.done:
            pipe.send(Outcome(clock.seconds, contestant.facts(clock)))
            os._exit(0)  # without the checkpoint of a run's end
        pipe.send(None)
        pipe.recv()

    clock = Clock(contestant.window, wait_for_turn)
    try:
        contestant.train(clock)
    except BaseException as raised:
        pipe.send(Outcome(error=describe(raised)))
        raise

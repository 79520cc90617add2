"""Traces a few steps of a run (torch.profiler), and times their parts on every rank.

Parts: `data` waits for batches and copies them to the device, `forward`, `backward`, `update` clips gradients and
changes weights. `reduction` is the time in which collectives ran, also where they overlap with the backward. On a GPU
parts lie between events of its stream, so that nothing waits before the last profiled step.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terakoya.training.run import Run
from terakoya.training.step_clock import now
from terakoya.training.watches import LossFn, StepTimer

PARTS = ("data", "forward", "backward", "reduction", "update")
ON_GPUS, ON_CPUS = ("nccl:", "nccldevkernel", "ncclkernel"), ("gloo:",)
"""How profilers begin the names of collectives, in lower case. Between GPUs those of CPUs are votes."""


class StepProfile(StepTimer):
    """Profiles the steps that the run's `profile` names; elsewhere it does nothing.

    Attributes:
        steps: how many steps were profiled so far.
    """

    def __init__(self, run: Run) -> None:
        assert run.parameters.profile is not None
        self.settings = run.parameters.profile
        self.folder = run.folder / "profile"
        self.context = run.context
        self.run_log = run.run_log
        self.steps = 0
        self._first = 0
        self._profiler: Any = None
        self._began: Any = None
        self._spans: list[tuple[str, Any, Any]] = []

    def begin(self, step: int) -> None:
        """Begins to profile where `step`, counted from 1, is one to profile; maybe while the step before it ends."""
        if self._profiler is not None or not self.settings.steps[0] <= step <= self.settings.steps[1]:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.context.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._first = step
        self._began = self._now()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times what happens inside as the part `name`."""
        if self._profiler is None:
            yield
            return
        began = self._now()
        with torch.profiler.record_function(name):
            yield
        self._spans.append((name, began, self._now()))

    @contextlib.contextmanager
    def forward_and_backward(self, loss_fn: LossFn) -> Iterator[LossFn]:
        """Times what happens inside: until `loss_fn`, for which what this yields stands, and after it."""
        if self._profiler is None:
            yield loss_fn
            return
        began, turned = self._now(), None

        def with_turn(sums: Mapping[str, Tensor]) -> Tensor:
            nonlocal turned
            loss = loss_fn(sums)
            turned = self._now()
            return loss

        with torch.profiler.record_function("forward and backward"):
            yield with_turn
        ended = self._now()
        self._spans += [("forward", began, turned or ended), ("backward", turned or ended, ended)]

    def end(self, step: int) -> None:
        """Counts the profiled `step`; after the last one writes traces and times. Collective then."""
        if self._profiler is None or step < self._first:
            return
        self.steps += 1
        if step >= self.settings.steps[1]:
            self.finish(step)

    def finish(self, step: int) -> None:
        """Writes what was profiled up to `step`, if anything; collective."""
        if self._profiler is None:
            return
        first, ended = self._first, self._now()
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()  # torch measures no time to an event that the GPU has not reached
        whole = self._seconds(self._began, ended)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        seconds: dict[str, float] = defaultdict(float)
        for name, began, ended in self._spans:
            seconds[name] += self._seconds(began, ended)
        seconds["reduction"] = collective_seconds(profiler.events())
        seconds["step"] = whole
        own = {name: 1000 * seconds[name] / max(1, self.steps) for name in (*PARTS, "step")}
        ranks = self.context.gather(own)
        slowest = slowest_rank(ranks)
        file = None
        if self.context.rank in (0, slowest):
            file = self._write_trace(profiler)
        if self.context.is_main:
            self.run_log.write("profile", step=step, first=first, milliseconds=ranks, slowest_rank=slowest)
            self.run_log.print(describe(ranks, slowest, first=first, last=step, file=file))
        self.steps, self._spans = 0, []

    def _write_trace(self, profiler: Any) -> Path | None:
        file = self.folder / f"trace-rank{self.context.rank}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            self.run_log.warn(f"{file}: the trace was not written ({error}); the run continues")
            return None
        return file

    def _now(self) -> Any:
        return now(on_gpu=self.context.device.type == "cuda")

    def _seconds(self, began: Any, ended: Any) -> float:
        seconds = ended - began if self.context.device.type != "cuda" else began.elapsed_time(ended) / 1000
        return float(seconds)


def collective_seconds(events: Sequence[Any]) -> float:
    """Returns how long collectives ran, of the `events` of a profiler; those that overlap count once."""
    names = ON_GPUS if any(each.name.lower().startswith(ON_GPUS) for each in events) else ON_CPUS
    spans = sorted(
        (each.time_range.start, each.time_range.end) for each in events if each.name.lower().startswith(names)
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


def slowest_rank(ranks: Sequence[Mapping[str, float]]) -> int:
    """Returns the rank with the most work of its own: its parts, without what it waits for others in collectives."""

    def own(times: Mapping[str, float]) -> float:
        return times["data"] + times["forward"] + max(0.0, times["backward"] - times["reduction"]) + times["update"]

    return max(range(len(ranks)), key=lambda rank: own(ranks[rank]))


def describe(ranks: Sequence[Mapping[str, float]], slowest: int, *, first: int, last: int, file: Path | None) -> str:
    """Returns the parts of rank 0 and of the slowest rank, and where the trace is, as lines."""
    lines = [f"profile of the steps {first:,} to {last:,}, milliseconds a step:"]
    for rank in sorted({0, slowest}):
        times = "  ".join(f"{name} {ranks[rank][name]:,.1f}" for name in (*PARTS, "step"))
        lines.append(f"  rank {rank}{' (slowest)' if rank == slowest and len(ranks) > 1 else ''}  {times}")
    return "\n".join(lines + ([f"  trace for https://ui.perfetto.dev: {file}"] if file else []))

"""What the main thread of this process does, as another thread sees it, at no cost to the main thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import terakoya

CORE = str(Path(terakoya.__file__).parent)
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
WRAPPERS = frozenset({"wrapper", "_wait", "_object_to_tensor", "_tensor_to_object"})
DEVICE = "the device"
OWN_WAITS = {"wait_for_sums": "all_reduce", "sum_and_wait": "all_reduce", "wait_for_device": DEVICE}
"""Functions of terakoya that wait for other ranks, and the collective that they wait in; or for the device, which may
itself wait for others."""
BACKWARD = "backward"
"""The function of autograd in which DDP also sums gradients over ranks."""


@dataclass(frozen=True)
class Activity:
    """What a process does.

    Attributes:
        place: the function that its main thread is in: a collective, `backward`, or the innermost one of terakoya.
        waits: whether the process may be waiting for other ranks there.
        since: when it was first seen there without having moved, in seconds since 1970.
        step: the run's step.
    """

    place: str
    waits: bool
    since: float
    step: int


class ActivityWatch:
    """Looks at the stack of a thread; it has moved if its position in any function, or the step, has changed."""

    def __init__(self, thread: int, step: Callable[[], int]) -> None:
        self._thread = thread
        self._step = step
        self._position: object = None
        self._since = 0.0

    def look(self) -> Activity:
        """Returns what the thread does now."""
        frames = []
        frame: FrameType | None = sys._current_frames().get(self._thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        step = self._step()
        position = (step, *((each.f_code, each.f_lasti) for each in frames))
        if position != self._position:
            self._position, self._since = position, time.time()
        place, waits = find_place(frames)
        return Activity(place, waits, self._since, step)


def find_place(frames: Sequence[FrameType]) -> tuple[str, bool]:
    """Returns `place` and `waits` of an `Activity` for the `frames` of a stack, innermost first."""
    for frame in frames:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file.endswith(COLLECTIVES) and name not in WRAPPERS:
            return name, True
        if name == BACKWARD and "/torch/" in file:
            return BACKWARD, True
        if file.startswith(CORE):
            return OWN_WAITS.get(name, name), name in OWN_WAITS
    return "another library", False

"""Batches that are copied to a GPU ahead: what happens on which stream, in which order, and how much is ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from terakoya.components import Batch
from terakoya.rows.loader import AHEAD
from terakoya.training import device_copies
from terakoya.training.batches import StepBatches, to_device
from terakoya.training.device_copies import CopyAhead

GPU = torch.device("cuda", 1)


class Machine:
    """A stand-in for torch's streams that notes what is done where.

    Attributes:
        done: the operations with the stream that was current, in order.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = "main"

    def note(self, text: str) -> None:
        self.done.append(f"{self.current}: {text}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    seen = Machine()

    class Stream:
        def __init__(self, device: torch.device, name: str = "side") -> None:
            assert device == GPU
            self.name = name

        def wait_event(self, event: Any) -> None:
            seen.note(f"{self.name} waits for {event.recorded}")

    class Event:
        recorded = "nothing"

        def record(self, stream: Stream) -> None:
            self.recorded = stream.name
            seen.note("event")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, seen.current = seen.current, stream.name
        yield
        seen.current = before

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        seen.note(f"device {which.index}")
        yield

    def pin(tensor: Tensor) -> Tensor:
        seen.note("pin")
        return tensor

    def move(tensor: Tensor, where: torch.device, *, non_blocking: bool = False) -> Tensor:
        assert where == GPU and non_blocking
        seen.note("copy")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: Stream(which, "main"))
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", move)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: seen.note(f"used on {stream.name}"))
    return seen


def batches(count: int, size: int = 4) -> StepBatches:
    real = [Batch({"ids": np.full(size, number), "labels": np.zeros(size)}, {"tokens": 1}) for number in range(count)]
    return StepBatches(real, None)


plain = partial(to_device, flash=False)


def test_copies_run_on_their_own_stream_and_the_step_waits_for_them_there(machine: Machine) -> None:
    step = CopyAhead(lambda _: batches(1), plain, GPU)(0)
    copying = ["pin", "copy", "pin", "copy", "event"]
    assert machine.done == ["main: device 1", *(f"side: {each}" for each in copying)]
    machine.done.clear()
    (copy,) = step.copies
    tensors = copy.take()
    assert machine.done == ["main: main waits for side", "main: used on main", "main: used on main"]
    assert tensors.keys() == {"ids", "labels"} and torch.equal(tensors["ids"], torch.zeros(4, dtype=torch.int64))


def test_what_is_ahead_has_a_bound(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "MOST_BYTES", AHEAD * 3 * 64)  # a batch has 2 arrays of 4 x 8 bytes
    steps = CopyAhead(lambda count: batches(count), plain, GPU)
    assert [len(steps(count).copies) for count in (0, 2, 3, 4, 9)] == [0, 2, 3, 3, 3]
    assert [int(copy.take()["ids"][0]) for copy in steps(4).copies] == [0, 1, 2]


def test_a_cpu_has_nothing_to_copy() -> None:
    made = batches(2)
    assert CopyAhead(lambda _: made, plain, torch.device("cpu"))(0) is made

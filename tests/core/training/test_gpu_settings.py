"""What a run sets for a GPU, and for the steps of every device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from command_line import call
from frozen import count as frozen_objects

from terakoya.config.parameters import Parameters
from terakoya.distributed import gpu_allocator
from terakoya.training import step_log
from terakoya.training.run_log import RunLog
from terakoya.training.setup import train_in_this_process
from terakoya.training.step_clock import FEWEST_STEPS, StepClock
from terakoya.training.trainer import Trainer
from terakoya_plugins.objectives.masked_lm import MaskedLM


def test_the_memory_of_a_gpu_grows_in_place_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has read the environment by then: the start of a run has asked the card whether it has bf16."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in gpu_allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    gpu_allocator.let_segments_grow()
    assert "PYTORCH_ALLOC_CONF" not in gpu_allocator.os.environ and not told
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # restored afterwards
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    gpu_allocator.let_segments_grow()
    assert gpu_allocator.os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert told == ["expandable_segments:True"]


@pytest.mark.slow
@pytest.mark.parametrize("frozen_before", [True, False])
def test_steps_run_with_frozen_garbage_and_validation_collates_in_a_thread(
    frozen_before: bool, store: Path, validation_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was frozen before stays so; what a run has frozen is thawed at its end."""
    frozen: list[int] = []
    train, collate = Trainer.train, MaskedLM.collate
    threads: dict[int, set[str]] = {}

    def watched_train(self: Trainer, stop: Any = None) -> Any:
        frozen.append(gc.get_freeze_count())
        return train(self, stop)

    def watched_collate(self: MaskedLM, rows: Any, vocabulary: Any) -> Any:
        threads.setdefault(len(frozen), set()).add(threading.current_thread().name)
        return collate(self, rows, vocabulary)

    monkeypatch.setattr(Trainer, "train", watched_train)
    monkeypatch.setattr(MaskedLM, "collate", watched_collate)
    monkeypatch.setattr(gc, "get_freeze_count", frozen_objects)
    settings = toy.parameters(store, validation_store, max_steps=2, evaluation={"steps": 2, "batches": 2})
    if frozen_before:
        gc.freeze()
    else:
        gc.unfreeze()
    try:
        before = gc.get_freeze_count()
        train_in_this_process(Parameters.from_dict(settings, source="run"), tmp_path / "run")
        after = gc.get_freeze_count()
    finally:
        gc.freeze()  # as conftest.py does
    assert frozen[0] > before and (before > 0) == (after > 0) == frozen_before
    assert threads[1] == {"terakoya-prefetch"}


READINGS = {"gpu_memory": 12.34, "gpu_power": 345.678, "gpu_temperature": 61.0}


def test_memory_power_and_temperature_are_in_records_lines_trackers_and_the_status(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked: list[Mapping[str, float]] = []
    monkeypatch.setattr(step_log, "gpu_values", lambda _: READINGS)
    monkeypatch.setattr(RunLog, "track", lambda _, __, values: tracked.append(values))
    settings = toy.parameters(store, max_steps=2, logging_steps=2)
    train_in_this_process(Parameters.from_dict(settings, source="run"), tmp_path / "run")
    said = capsys.readouterr()
    assert any("step 2/2" in line and "GPU 12.3 GB 346 W 61 °C" in line for line in said.err.splitlines())
    steps = list(toy.records(tmp_path / "run").values())
    assert steps and all(record[name] == value for record in steps for name, value in READINGS.items())
    ours = [values for values in tracked if "train/loss" in values]
    assert len(ours) == len(steps)
    assert all(values[f"train/{name}"] == value for values in ours for name, value in READINGS.items())
    assert "GPU 12.3 GB  346 W  61 °C" in call(capsys, "status", tmp_path / "run")[1]


class Marks:
    """Events of a GPU that is as far as `reached` events."""

    reached = 0
    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def elapsed_time(self, end: Marks) -> float:
        return float(end.number - self.number)

    def record(self) -> None:
        Marks.recorded += 1
        self.number = Marks.recorded

    def query(self) -> bool:
        return self.number <= Marks.reached


@pytest.mark.parametrize(("behind", "share"), [(0, 1.0), (1, 0.0), (2, 0.0)])
def test_a_gpu_waits_where_it_is_done_with_a_forward_pass_before_its_step_has_been_started(
    behind: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Marks)
    monkeypatch.setattr(Marks, "recorded", 0)
    clock = StepClock(torch.device("cuda"))
    loss_fn = clock.until_loss(lambda value: value)
    for steps, known in ((FEWEST_STEPS, False), (FEWEST_STEPS + 1, True), (FEWEST_STEPS + 1, True)):
        for step in range(steps):
            clock.begin()
            assert loss_fn(torch.tensor(3.0)) == 3
            # in the first step after a record the host has waited for the GPU, whichever is slower
            monkeypatch.setattr(Marks, "reached", Marks.recorded if step == 0 else Marks.recorded - behind)
            clock.step_started()
        assert clock.take_waits() == (share if known else None)
    clock.step_started()  # without a forward pass here, as on a rank of a pipeline
    assert clock.take_waits() is None


def test_a_cpu_has_no_backlog() -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(2 * FEWEST_STEPS):
        clock.begin()
        clock.until_loss(lambda: torch.zeros(()))()
        clock.step_started()
    assert clock.take_waits() is None


@pytest.mark.parametrize(("shares", "said"), [((0.5, 0.96, 1.0), 1), ((0.5, 0.89, 0.0), 0)])
def test_a_run_says_once_that_its_gpu_waits_for_the_processor(
    shares: tuple[float, ...], said: int, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    left = list(shares)
    monkeypatch.setattr(StepClock, "take_waits", lambda _: left.pop(0) if left else None)
    settings = toy.parameters(store, max_steps=6, logging_steps=2)
    train_in_this_process(Parameters.from_dict(settings, source="run"), tmp_path / "run")
    notices = [line for line in capsys.readouterr().err.splitlines() if "the GPU waits for the processor" in line]
    assert len(notices) == said and all(" in 96% of the steps" in each for each in notices)
    steps = toy.records(tmp_path / "run")
    assert [record["gpu_waits"] for record in steps.values() if "gpu_waits" in record] == list(shares)

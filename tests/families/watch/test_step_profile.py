"""Profiled steps: a trace that a viewer reads, the time of each phase, which rank is slowest."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training import gpu_state
from terakoya.training.setup import train_in_this_process
from terakoya_watch.step_profile import PARTS, StepProfile, collective_seconds, describe, slowest_rank


@pytest.mark.slow
def test_profiled_steps_are_traced_and_timed_and_change_nothing(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=5)
    train_in_this_process(Parameters.from_dict(settings, source="plain"), tmp_path / "plain")
    profiled = Parameters.from_dict({**settings, "profile": {"steps": [2, 4]}}, source="profiled")
    train_in_this_process(profiled, tmp_path / "run")
    assert toy.losses(tmp_path / "run") == toy.losses(tmp_path / "plain")

    trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / "trace-rank0.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"data", "forward and backward", "update", "aten::addmm"} <= names
    updates = [event for event in trace["traceEvents"] if event.get("name") == "update" and event.get("ph") == "X"]
    assert len(updates) == 3

    (record,) = toy.records(tmp_path / "run", "profile").values()
    (times,) = record["milliseconds"]
    assert record["first"] == 2 and record["step"] == 4 and record["slowest_rank"] == 0
    assert all(times[name] > 0 for name in ("data", "forward", "backward", "update")) and times["reduction"] == 0
    assert sum(times[name] for name in PARTS) <= times["step"]


@pytest.mark.nightly
def test_two_processes_say_how_long_reductions_take(store: Path, tmp_path: Path) -> None:
    """The vote on a profiled step begins in the step before it, which is not counted; the run ends before the last."""
    toy.train(toy.parameters(store, max_steps=4, profile={"steps": [2, 9]}), tmp_path / "run", nodes=(2,))
    (record,) = toy.records(tmp_path / "run", "profile").values()
    assert record["first"] == 2 and record["step"] == 4
    assert len(record["milliseconds"]) == 2
    assert all(times["reduction"] > 0 for times in record["milliseconds"])
    traces = {path.name for path in (tmp_path / "run" / "profile").iterdir()}
    assert traces == {"trace-rank0.json.gz", f"trace-rank{record['slowest_rank']}.json.gz"}


def test_steps_in_the_wrong_order_are_refused(store: Path) -> None:
    with pytest.raises(UserError, match=r"profile.*expected the first and the last step, got \[5, 4\]"):
        Parameters.from_dict(toy.parameters(store, profile={"steps": [5, 4]}), source="p")


def times(**changes: float) -> dict[str, float]:
    return {"data": 1.0, "forward": 10.0, "backward": 30.0, "reduction": 10.0, "update": 2.0, "step": 44.0, **changes}


class _Event:
    """An event of a GPU, which has reached it once the host has waited for the GPU."""

    recorded: ClassVar[list["_Event"]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_reached = False

    def record(self) -> None:
        self.recorded.append(self)

    def elapsed_time(self, end: "_Event") -> float:
        if not (self.is_reached and end.is_reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 5.0


def test_on_a_gpu_no_time_is_taken_to_an_event_that_it_has_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        for event in _Event.recorded:
            event.is_reached = True

    said: list[str] = []
    profiler = SimpleNamespace(start=str, stop=str, events=list, export_chrome_trace=str)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profiler)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    context = SimpleNamespace(device=torch.device("cuda", 0), rank=0, is_main=True, gather=lambda value: [value])
    run: Any = SimpleNamespace(
        parameters=SimpleNamespace(profile=SimpleNamespace(steps=(2, 2))), folder=tmp_path, context=context,
        run_log=SimpleNamespace(write=lambda *_, **__: None, print=said.append, warn=said.append),
    )  # fmt: skip
    profile = StepProfile(run)
    profile.begin(2)
    with profile.part("update"):
        pass
    profile.end(2)
    assert "update 5.0" in said[0] and "step 5.0" in said[0]


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    ranks = [times(), times(forward=15.0, reduction=5.0), times(backward=40.0, reduction=20.0)]
    assert slowest_rank(ranks) == 1
    text = describe(ranks, 1, first=3, last=5, file=Path("trace"))
    assert "rank 0  data 1.0" in text and "rank 1 (slowest)" in text and "rank 2" not in text


def test_collectives_that_overlap_count_once() -> None:
    def event(name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [event("gloo:all_reduce", 0, 2e6), event("gloo:all_reduce", 1e6, 3e6), event("aten::mm", 0, 9e6)]
    assert collective_seconds(events) == 3.0
    on_gpus = [event("nccl:all_reduce", 5e6, 7e6), event("ncclDevKernel_AllReduce", 6e6, 7.5e6)]
    assert collective_seconds([*events, *on_gpus]) == 2.5, "between GPUs, what CPUs say are votes"


def test_what_is_known_of_a_gpu_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> float:
        raise ModuleNotFoundError("pynvml")

    assert gpu_state.gpu_values(torch.device("cpu")) == {}
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12_340_000_000)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 345_678)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 61)
    values = gpu_state.gpu_values(device)
    assert values == {"gpu_memory": 12.34, "gpu_power": 345.678, "gpu_temperature": 61}
    assert gpu_state.describe({"loss": 1.0, **values}) == "GPU 12.3 GB 346 W 61 °C"
    monkeypatch.setattr(torch.cuda, "power_draw", missing)
    monkeypatch.setattr(torch.cuda, "temperature", missing)
    assert gpu_state.gpu_values(device) == {"gpu_memory": 12.34}
    assert gpu_state.describe({"loss": 1.0}) == ""


def test_a_card_that_does_not_tell_its_power_is_trained_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a virtual machine with a part of a card, where the package's own error says so."""

    class NVMLError(Exception):
        """The class that nvidia-ml-py derives NVMLError_NotSupported and NVMLError_NoPermission from."""

    def refuse(_: object) -> float:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 12_340_000_000)
    monkeypatch.setattr(torch.cuda, "power_draw", refuse)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 61)
    assert gpu_state.gpu_values(torch.device("cuda", 0)) == {"gpu_memory": 12.34, "gpu_temperature": 61}

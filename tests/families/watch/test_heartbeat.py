"""What the beats of all ranks say: which rank is late, where the others wait, which is the slowest."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy

from terakoya.distributed.rank_watch import find_communication_error
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import UserError
from terakoya.training import step_health
from terakoya.training.progress_line import describe_excess
from terakoya.training.step_clock import StepClock
from terakoya_watch import heartbeat
from terakoya_watch.activity import Activity, ActivityWatch, find_place
from terakoya_watch.beats import GONE_BEATS, SILENT_BEATS, Beat, Ranks, process_here


def ranks(count: int = 4) -> Ranks:
    hosts = ("a01", "a01", "a02", "a02")
    return Ranks(Topology(tuple(ProcessInfo(rank, rank // 2, rank % 2, hosts[rank]) for rank in range(count))), own=0)


def at(hour: str) -> float:
    return time.mktime(time.strptime(f"2020-11-23 {hour}", "%Y-%m-%d %H:%M:%S"))


def beats(number: int, activities: dict[int, Activity] | None = None, **changes: object) -> dict[int, Beat]:
    waits = Activity("all_reduce", True, at("21:04:12"), 7)
    return {rank: Beat(number, (activities or {}).get(rank, waits), **changes) for rank in range(4)}  # type: ignore[arg-type]


def test_a_rank_without_news_is_named_with_what_it_did_and_what_the_others_wait_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: at("21:04:11"))
    seen = ranks()
    stopped = Activity("backward", True, at("21:04:10"), 7)
    seen.look(beats(1, {3: stopped}))
    for number in range(2, 2 + SILENT_BEATS):
        assert seen.report() == ""
        seen.look({**beats(number), 3: Beat(1, stopped)})
    assert seen.report() == (
        "rank 3 on a02 has been in backward since 21:04:10 (step 7), and has not answered since 21:04:11: its process "
        "is stopped or gone, or its host is; 3 ranks wait in all_reduce since 21:04:12"
    )
    assert seen.beats_silent() == SILENT_BEATS
    seen.look(beats(99))
    assert seen.report() == "" and seen.beats_silent() == 0


def ended_process() -> int:
    """The id of a process that has ended."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_an_error_a_rank_of_this_host_is_named_as_soon_as_its_process_is_known_to_be_gone() -> None:
    namespace, own = process_here().split()
    gone = ended_process()
    processes = {0: f"{namespace} {own}", 1: f"{namespace} {gone}", 2: f"{namespace} {gone}", 3: ""}
    seen = ranks()
    for number in range(1, 2 + GONE_BEATS):
        assert seen.report(after_an_error=True) == "", "its last news, which says whether it has left, is still to come"
        others = {rank: beat for rank, beat in beats(1).items() if rank}
        seen.look(
            {rank: replace(beat, process=processes[rank]) for rank, beat in {0: beats(number)[0], **others}.items()}
        )
    named = seen.report(after_an_error=True)
    assert named.startswith("rank 1 on a01 has been in all_reduce since ") and "; 3 ranks wait in" in named
    assert named.count(": its process is gone") == 1, "rank 2 has such an id, too, but on another host"
    assert seen.report() == "", "at the end of a run processes leave one after the other"
    for process in (f"{namespace} {own}", f"pid:[1] {gone}", ""):  # it lives; another container's; unknown
        seen.look({1: replace(beats(1)[1], process=process)})
        assert seen.report(after_an_error=True) == "", process
    seen.look({1: replace(beats(1)[1], process=processes[1], ended=True)})
    assert seen.report(after_an_error=True) == ""


def test_a_rank_that_does_not_move_while_others_wait_is_named() -> None:
    reading = Activity("load", False, at("21:04:11"), 7)
    seen = ranks()
    seen.look(beats(1, {2: reading}))
    assert seen.report() == (
        "rank 2 on a02 has been in load since 21:04:11 (step 7); 3 ranks wait in all_reduce since 21:04:12"
    )


def test_ranks_that_all_compute_for_long_are_not_late() -> None:
    seen = ranks()
    seen.look(beats(1, dict.fromkeys(range(4), Activity("write_models", False, at("21:04:11"), 7))))
    assert seen.report() == ""


def on_the_device(since: float, *, steps: int, count: int = 4) -> dict[int, Beat]:
    """All ranks wait for the device; a step takes 20 s to its backward pass."""
    return {
        rank: Beat(1, Activity("the device", True, since + rank, 7), (steps, 20.0 * steps)) for rank in range(count)
    }


def test_devices_that_hang_on_all_ranks_are_told_as_such_and_no_rank_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: at("21:30:00"))
    seen = ranks()
    seen.look(on_the_device(at("21:26:37"), steps=5))
    assert seen.report() == ("no rank's device has finished its work since 21:26:40 (step 7): a card or NCCL hangs")
    seen.look(on_the_device(at("21:27:00"), steps=5))
    assert seen.report() == "", "ten of its slow steps are not over"
    seen.look(on_the_device(at("21:26:37"), steps=0))
    assert seen.report() == "", "the first step may take minutes"
    seen.look(on_the_device(at("21:24:00"), steps=0))
    assert "a card or NCCL hangs" in seen.report()
    reading = Activity("load", False, at("21:24:00"), 7)
    seen.look({2: Beat(2, reading, (5, 100.0))})
    assert seen.report().startswith("rank 2 on a02 has been in load since") and "in the device" in seen.report()
    some = ranks()
    some.look(on_the_device(at("21:20:00"), steps=5, count=2))
    assert some.report() == "", "what the others do is not known"


def test_a_thread_that_waits_for_the_device_may_wait_for_other_ranks() -> None:
    reached, waiting = threading.Event(), threading.Event()

    class Recorded:
        def synchronize(self) -> None:
            waiting.set()
            reached.wait(10)

    thread = threading.Thread(target=step_health.wait_for_device, args=(Recorded(),))
    thread.start()
    assert waiting.wait(10)
    activity = ActivityWatch(thread.ident or 0, lambda: 3).look()
    reached.set()
    thread.join()
    assert (activity.place, activity.waits) == ("the device", True)


def test_a_rank_that_failed_is_the_cause_and_one_that_left_is_not_late() -> None:
    seen = ranks()
    for _ in range(SILENT_BEATS + 2):
        seen.look(
            {**beats(1, ended=True), 1: Beat(1, Activity("step", False, at("21:04:11"), 7), error="ValueError: no")}
        )
    assert seen.report().startswith("rank 1 on a01 ended with ValueError: no")
    seen.look(beats(2, ended=True))
    assert seen.report() == ""


def test_many_late_ranks_make_a_short_message() -> None:
    seen = Ranks(Topology(tuple(ProcessInfo(rank, 0, rank, "a01") for rank in range(100))), own=0)
    for _ in range(SILENT_BEATS + 1):
        seen.look({rank: Beat(1, Activity("load", False, 0.0, 0)) for rank in range(100)})
    assert len(seen.report()) < 1000 and "; 95 more ranks" in seen.report()


def test_the_slowest_rank_is_that_which_works_longest_before_it_waits() -> None:
    def after(steps: int, *seconds: float) -> dict[int, Beat]:
        activity = Activity("step", False, at("21:04:11"), 0)
        return {rank: Beat(steps, activity, (steps, each * steps)) for rank, each in enumerate(seconds)}

    seen = ranks()
    assert seen.slowest() is None
    seen.look(after(10, 1.0, 1.0, 1.0, 1.0))
    assert seen.slowest() is None, "rates are between two calls"
    assert seen.slowest() is None, "no step since"
    seen.look(after(20, 1.0, 1.0, 1.1, 1.0))
    rank, excess = seen.slowest() or (None, 0.0)
    assert rank == 2 and excess == pytest.approx(0.2)


def test_a_look_at_any_instant_finds_as_many_steps_as_seconds() -> None:
    """Steps counted apart from their seconds made a rank `over +1000%` slower where few steps are looked at."""
    clock, seen = StepClock(torch.device("cpu")), []
    for _ in range(3):
        clock.measure(lambda: time.sleep(0.01))  # the next rows
        seen.append(clock.done)
        clock.begin()
        time.sleep(0.01)
        clock.until_loss(lambda: torch.zeros(()))()
        seen.append(clock.done)
        clock.end()
    assert [steps for steps, _ in seen] == [0, 1, 1, 2, 2, 3]
    assert seen[0] == (0, 0.0) and seen[1] == seen[2] and seen[3] == seen[4]
    assert all(seconds >= 0.02 * steps for steps, seconds in seen), seen


def test_a_beat_survives_its_travel() -> None:
    beat = Beat(3, Activity("backward", True, 1.5, 7), (7, 0.25), "ValueError: だめ", gives_up=True)
    assert Beat.from_json(beat.to_json().encode()) == beat


@pytest.mark.slow
def test_a_rank_does_not_wait_for_news_of_one_that_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits in C++ while its process ends would abort it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    topology = Topology((ProcessInfo(0, 0, 0, "a01"), ProcessInfo(1, 0, 1, "a01")))
    first, second = (heartbeat.Heartbeat(topology, rank, 60.0, "first") for rank in range(2))
    first.close()  # before its first beat
    time.sleep(1.5 * heartbeat.BEAT_SECONDS)
    second.close()
    assert not second._threads[0].is_alive()


@pytest.mark.slow
def test_ranks_whose_agents_count_restarts_differently_hear_each_other(store: Path, tmp_path: Path) -> None:
    """An agent of torchrun counts a restart that its own process caused, and not one that another host's did."""
    settings = toy.parameters(store, batch_size={"0": 9, "1": 7}, max_steps=100_000, checkpoint={})
    environments = [{"TORCHELASTIC_RESTART_COUNT": str(count)} for count in (1, 0)]
    started = toy.start(settings, tmp_path / "run", nodes=(1, 1), environment_of_rank=environments)
    deadline = time.monotonic() + 90
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or "slowest_rank" not in metrics.read_text():  # rank 0 knows the steps of both
        assert all(each.running() for each in started) and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(started[1].pid, signal.SIGTERM)
    assert "stopped by SIGTERM at step" in toy.finish(started, code=75)  # rank 0 says why rank 1 stops


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "+0%"), (0.214, "+21%"), (10.0, "+1000%"), (157595.5, "over +1000%")]
)
def test_how_much_slower_a_rank_is_stays_readable(share: float, words: str) -> None:
    assert describe_excess(share) == words


@pytest.fixture
def thread() -> Iterator[tuple[threading.Thread, list[threading.Event]]]:
    """A thread that waits for one event after another."""
    events = [threading.Event(), threading.Event()]
    waiting = threading.Thread(target=lambda: [event.wait() for event in events])
    waiting.start()
    yield waiting, events
    for event in events:
        event.set()
    waiting.join()


def test_a_thread_that_does_not_move_has_been_there_since_it_was_first_seen(
    thread: tuple[threading.Thread, list[threading.Event]],
) -> None:
    steps = [1]
    watch = ActivityWatch(thread[0].ident or 0, lambda: steps[0])
    deadline = time.monotonic() + 60
    while True:  # until the thread waits
        first = watch.look()
        time.sleep(0.05)
        if watch.look() == first:
            break
        assert time.monotonic() < deadline
    assert not first.waits
    steps[0] = 2
    assert watch.look().since > first.since


def test_a_collective_is_called_by_its_name() -> None:
    places = []

    def while_inside(frame: object, event: str, argument: object) -> None:
        if event == "call" and sys._getframe(1).f_code is dist.get_world_size.__code__:
            places.append(find_place([sys._getframe(1)]))

    sys.setprofile(while_inside)
    try:
        with pytest.raises(ValueError, match="process group"):
            dist.get_world_size()
    finally:
        sys.setprofile(None)
    assert set(places) == {("get_world_size", True)}


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (dist.DistBackendError(f"{NCCL}, unhandled system error\nncclSystemError: ..."), True),
        (
            dist.DistBackendError(f"{NCCL}, invalid usage\nncclInvalidUsage: ...\nDuplicate GPU detected : rank 1"),
            False,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_which_errors_may_come_of_another_rank(error: Exception, is_one: bool) -> None:
    assert (find_communication_error(error) is not None) is is_one


def test_what_a_pipeline_raises_of_a_lost_connection_comes_of_another_rank() -> None:
    """torch names the stage, and nothing of what happened in it."""

    def raised_from(cause: Exception) -> RuntimeError:
        error = RuntimeError("[Stage 1] failed to run forward: args: ('Tensor(torch.Size([2, 32, 16]))',)")
        error.__cause__ = cause
        return error

    assert find_communication_error(raised_from(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed")))
    assert find_communication_error(raised_from(dist.DistBackendError("NCCL error")))
    assert find_communication_error(raised_from(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))) is None
    assert find_communication_error(raised_from(UserError("the mail server: Connection closed"))) is None


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        ("", "lost the connection to another rank, which has just ended. The same command"),
        (
            "2 ranks wait in all_reduce",
            "and all still answer: 2 ranks wait in all_reduce. The same command",
        ),
    ],
)
def test_a_lost_connection_says_where_the_others_wait_if_any_does(
    waiting: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    others = SimpleNamespace(report=lambda **_: "", waiting=lambda: waiting)
    here: Any = SimpleNamespace(_ranks=others, _report="", _rank=1, name=lambda rank: f"rank {rank} on a01")
    lost = heartbeat.Heartbeat.explain(here, dist.DistError("Connection closed by peer"))
    assert said in str(lost) and "(rank 1 on a01 got from torch: Connection closed by peer" in str(lost)

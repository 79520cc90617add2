"""A rank that hangs or is gone is named, and the others leave."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import toy

TIMEOUT = 10


@contextmanager
def running(store: Path, out: Path) -> Iterator[list[toy.Process]]:
    """An endless run of two processes on two pretended nodes, from its first logged steps on."""
    settings = toy.parameters(
        store, batch_size={"0": 9, "1": 7}, max_steps=1_000_000, logging_steps=20, checkpoint={"save_steps": 10**6},
        parallel={"timeout_seconds": TIMEOUT},
    )  # fmt: skip
    started = toy.start(settings, out, nodes=(1, 1))
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(toy.records(out)) >= 2, started)
        yield started
    finally:
        for each in started:
            each.process.kill()


def wait_for(condition: Callable[[], object], started: list[toy.Process], *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, [each.output.read_text() for each in started]
        time.sleep(0.05)


def listens_to_strangers(process: toy.Process) -> bool:
    """Whether a port of the process can be reached over every interface of this machine."""
    sockets = psutil.Process(process.pid).net_connections("inet")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.ip in ("0.0.0.0", "::") for each in sockets)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_within_ten_seconds_and_the_others_leave(
    rank: int, store: Path, tmp_path: Path
) -> None:
    name = rf"rank {rank} on \S+ has been in \w+ since \d\d:\d\d:\d\d \(step [\d,]+\), and has not answered since "
    said = re.compile(
        rf"^warning: {name}\d\d:\d\d:\d\d: its process is stopped or gone, or its host is; rank {1 - rank} on \S+ "
        r"waits in (all_reduce|backward) since \d\d:\d\d:\d\d\. Without an answer the run ends after 10 s$",
        re.M,
    )
    with running(store, tmp_path / "run") as started:
        assert not any(map(listens_to_strangers, started)), "all processes are on this machine"
        os.kill(started[rank].pid, signal.SIGSTOP)
        other = started[1 - rank]
        wait_for(lambda: said.search(other.output.read_text()), started, seconds=10)
        wait_for(lambda: not other.running(), started, seconds=TIMEOUT + 20)
        text = other.output.read_text()
        assert other.process.exitcode == 76
        assert re.search(rf"^error: {name}", text, re.M) and "Traceback" not in text
    if rank == 1:
        (error,) = toy.records(tmp_path / "run", "error").values()
        assert "rank 1 on" in error["text"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_that_was_only_stopped_for_a_while_answers_again(store: Path, tmp_path: Path) -> None:
    with running(store, tmp_path / "run") as started:
        os.kill(started[1].pid, signal.SIGSTOP)
        output = started[0].output
        wait_for(lambda: "has not answered since" in output.read_text(), started, seconds=TIMEOUT - 1)
        os.kill(started[1].pid, signal.SIGCONT)
        wait_for(lambda: "all ranks answer again" in output.read_text(), started, seconds=10)
        before = max(toy.records(tmp_path / "run"))
        wait_for(lambda: max(toy.records(tmp_path / "run")) > before, started, seconds=30)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(rank: int, store: Path, tmp_path: Path) -> None:
    """Rank 0 takes the store with it, at which the others read who is late."""
    with running(store, tmp_path / "run") as started:
        os.kill(started[rank].pid, signal.SIGKILL)
        wait_for(lambda: not started[1 - rank].running(), started, seconds=10)
        assert started[1 - rank].process.exitcode == 76
        assert re.search(rf"error: rank {rank} on \S+ has been in ", started[1 - rank].output.read_text())

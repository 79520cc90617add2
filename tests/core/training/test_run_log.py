"""The record of a run: complete, and never in the way of the loop."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from terakoya.components import Tracker
from terakoya.training.run_log import RunLog

RELEASE = threading.Event()


class Slow(Tracker):
    """A tracker whose server hangs."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> "Slow":
        return self

    def log(self, step: int, values: Mapping[str, float]) -> None:
        RELEASE.wait(20)

    def close(self) -> None:
        pass


class Broken(Slow):
    """A tracker whose key was revoked."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("401")


def test_a_hanging_tracker_never_stalls(tmp_path: Path) -> None:
    RELEASE.clear()
    run_log = RunLog(tmp_path, [Slow()], {}, active=True)
    start = time.perf_counter()
    for step in range(2000):
        run_log.track(step, {"loss": 1.0})
    assert time.perf_counter() - start < 1.0
    RELEASE.set()
    run_log.close()


class Opening(Slow):
    """A tracker that hangs for ever before it can take anything."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> "Slow":
        threading.Event().wait()
        raise AssertionError


class Quitting(Slow):
    """A tracker whose library ends the program when it is not logged in."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> "Slow":
        raise SystemExit(1)


class Closing(Slow):
    """A tracker that hangs for ever when it should finish."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        threading.Event().wait()


class Kept(Slow):
    """A tracker that keeps what it is given."""

    taken: ClassVar[list[int]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.taken.append(step)


def test_trackers_that_hang_for_ever_end_no_run_and_keep_no_other_from_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hang, one for ever in opening and one in closing; the record is closed after one wait, not one for each."""
    monkeypatch.setattr("terakoya.training.run_log.SECONDS_TO_FINISH", 1.0)
    monkeypatch.setattr("terakoya.training.run_log.QUEUE_LENGTH", 50)
    Kept.taken.clear()
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        run_log = RunLog(tmp_path, [Opening(), Closing(), Quitting(), Kept()], {}, active=True)
        slowest = 0.0
        for step in range(200):
            start = time.perf_counter()
            run_log.track(step, {"loss": 1.0})
            slowest = max(slowest, time.perf_counter() - start)
            run_log.write("step", step=step, loss=1.0)
            if step % 20 == 0:
                time.sleep(0.01)
        start = time.perf_counter()
        run_log.close()
    assert time.perf_counter() - start < 1.9 and slowest < 0.5
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 200
    assert Kept.taken == sorted(Kept.taken) and len(Kept.taken) >= 50
    told = "\n".join(caplog.messages)
    assert "tracker Opening fell behind" in told and "tracker Closing fell behind" in told
    assert "tracker Quitting: SystemExit: 1; it is off" in told


def test_a_program_ends_though_a_tracker_hangs(tmp_path: Path) -> None:
    """In a process of its own: nothing is left that would keep it."""
    program = f"""
import threading
from pathlib import Path
from terakoya.components import Tracker
from terakoya.training import run_log as record
class Hangs(Tracker):
    def open(self, run_folder, parameters):
        threading.Event().wait()
record.SECONDS_TO_FINISH = 0.2
kept = record.RunLog(Path({str(tmp_path)!r}), [Hangs()], {{}}, active=True)
kept.track(1, {{"loss": 1.0}})
kept.close()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_broken_tracker_is_named_once_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        run_log = RunLog(tmp_path, [Broken()], {}, active=True)
        for step in range(5):
            run_log.track(step, {"loss": 1.0})
        run_log.close()
    told = [message for message in caplog.messages if "Broken" in message]
    assert "ConnectionError: 401" in told[0]
    assert sum("is off for the rest" in message for message in told) == 1


def test_metrics_are_json_lines_even_when_a_number_is_none(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, [], {}, active=True)
    run_log.write("step", step=1, loss=float("nan"), grad_norm=2.0)
    run_log.warn("日本語", step=1)
    run_log.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["loss"] is None and first["grad_norm"] == 2.0 and first["kind"] == "step"
    assert second["text"] == "日本語" and second["kind"] == "warning"


def test_a_line_that_a_killed_run_left_unfinished_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for before in ('{"kind": "step", "step": 1}\n{"kind": "st', '{"kind": "step", "step": 1}\n'):
        file.write_text(before)
        run_log = RunLog(tmp_path, [], {}, active=True)
        run_log.write("resume", step=1)
        run_log.close()
        assert [json.loads(line)["kind"] for line in file.read_text().splitlines()] == ["step", "resume"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, [Slow()], {}, active=False)
    run_log.write("step", step=1)
    run_log.track(1, {})
    run_log.close()
    assert not list(tmp_path.iterdir())

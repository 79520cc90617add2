"""The log of a run: it is complete, and never delays the loop."""

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from terakoya.components import Tracker
from terakoya.errors import UserError
from terakoya.runs import metrics
from terakoya.runs.folder import lock_run
from terakoya.training import validation
from terakoya.training.run_log import RunLog, recorded_refusal
from terakoya.training.screen import StepView

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


def test_a_refused_start_is_told_in_the_metrics_of_a_run_that_nobody_uses(tmp_path: Path) -> None:
    def refuse(folder: Path) -> list[Any]:
        with pytest.raises(UserError, match="other seed"), recorded_refusal(folder):
            raise UserError("other seed")
        return [each["text"] for each in metrics.read(folder).of_kind("error")] if folder.exists() else []

    run = tmp_path / "run"
    assert refuse(run) == [] and not run.exists()
    RunLog(tmp_path, [], {}, active=True).close()
    assert refuse(tmp_path) == ["other seed"]
    held = lock_run(tmp_path / "run.lock")
    assert refuse(tmp_path) == ["other seed"], "another process is at work here"
    os.close(held)
    assert refuse(tmp_path) == ["other seed"] * 2


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
    """A tracker that hangs for ever while it opens."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> "Slow":
        threading.Event().wait()
        raise AssertionError


class Quitting(Slow):
    """A tracker whose library ends the program when it is not logged in."""

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> "Slow":
        raise SystemExit(1)


class Closing(Slow):
    """A tracker that hangs for ever while it closes."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        threading.Event().wait()


class Recording(Slow):
    """A tracker that keeps the steps it receives."""

    steps: ClassVar[list[int]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)


@pytest.mark.slow
def test_trackers_that_hang_for_ever_block_neither_the_run_nor_other_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One hangs while opening, one while closing; the log is closed after one wait for both."""
    monkeypatch.setattr("terakoya.training.run_log.SECONDS_TO_FINISH", 1.0)
    monkeypatch.setattr("terakoya.training.run_log.QUEUE_LENGTH", 50)
    Recording.steps.clear()
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        run_log = RunLog(tmp_path, [Opening(), Closing(), Quitting(), Recording()], {}, active=True)
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
    assert Recording.steps == sorted(Recording.steps) and len(Recording.steps) >= 50
    messages = "\n".join(caplog.messages)
    assert "tracker Opening fell behind" in messages and "tracker Closing fell behind" in messages
    assert "tracker Quitting: SystemExit: 1; it is off" in messages


@pytest.mark.slow
def test_a_process_exits_although_a_tracker_hangs(tmp_path: Path) -> None:
    """In its own process, which no leftover thread may keep alive."""
    program = f"""
import threading
from pathlib import Path
from terakoya.components import Tracker
from terakoya.training import run_log
class Hangs(Tracker):
    def open(self, run_folder, parameters):
        threading.Event().wait()
run_log.SECONDS_TO_FINISH = 0.2
log = run_log.RunLog(Path({str(tmp_path)!r}), [Hangs()], {{}}, active=True)
log.track(1, {{"loss": 1.0}})
log.close()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_broken_tracker_is_named_once_and_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        run_log = RunLog(tmp_path, [Broken()], {}, active=True)
        for step in range(5):
            run_log.track(step, {"loss": 1.0})
        run_log.close()
    messages = [message for message in caplog.messages if "Broken" in message]
    assert "ConnectionError: 401" in messages[0]
    assert sum("is off for the rest" in message for message in messages) == 1


def test_metrics_are_json_lines_even_for_nan(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, [], {}, active=True)
    run_log.write("step", step=1, loss=float("nan"), grad_norm=2.0)
    run_log.warn("日本語", step=1)
    run_log.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["loss"] is None and first["grad_norm"] == 2.0 and first["kind"] == "step"
    assert second["text"] == "日本語" and second["kind"] == "warning"


def test_an_unfinished_line_of_a_killed_run_is_removed(tmp_path: Path) -> None:
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


def test_a_full_disk_never_ends_the_run_and_what_had_no_room_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("terakoya.training.run_log.PENDING_BYTES", 500)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run_log = RunLog(tmp_path, [], {}, active=True)
    for step in range(100):
        run_log.write("step", step=step)
    run_log.sync()
    printed = capsys.readouterr().err
    assert printed.count("metrics.jsonl cannot be written (No space left on device); the run continues") == 1
    assert run_log.file is not None
    run_log.file.close()
    run_log.file = (tmp_path / "later").open("ab", buffering=0)
    run_log.write("step", step=100)
    run_log.close()
    lines = [json.loads(line) for line in (tmp_path / "later").read_text().splitlines()]
    kept = len(lines) - 1
    assert [line["step"] for line in lines[:-1]] == list(range(kept)) and 5 < kept < 20
    assert lines[-1]["kind"] == "warning" and f"{101 - kept} records of metrics.jsonl are missing" in lines[-1]["text"]


def test_records_that_never_found_room_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run_log = RunLog(tmp_path, [], {}, active=True)
    for step in range(7):
        run_log.write("step", step=step)
    run_log.close()
    assert "the last 7 records of metrics.jsonl are missing" in capsys.readouterr().err


class SlowDisk(io.FileIO):
    """A disk that takes part of what is written, and its time."""

    def write(self, content: Any) -> int:
        with memoryview(content) as part:
            time.sleep(0.0005)
            return super().write(part[:40]) or 0


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path, [], {}, active=True)
    assert run_log.file is not None
    run_log.file.close()
    run_log.file = SlowDisk(tmp_path / "metrics.jsonl", "ab")

    def write(writer: str) -> None:
        for step in range(20):
            run_log.write("step", writer=writer, step=step)

    threads = [threading.Thread(target=write, args=[name]) for name in ("loop", "mirror", "saver")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("loop", "mirror", "saver"):
        assert [record["step"] for record in records if record["writer"] == name] == [*range(20)]


def test_a_terminal_that_was_closed_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed while the run goes on to save."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    log = RunLog(tmp_path, [], {}, active=True)
    log.print("one")
    log.warn("two")
    log.show_step(StepView({"step": "3"}, 0.5, ("3/6",), "three"), last=True)
    log.on_terminal = True
    log.show_step(StepView({"step": "3"}, 0.5, ("3/6",), "three"))
    logging.getLogger("terakoya").warning("four")
    log.close()
    assert "two" in (tmp_path / "metrics.jsonl").read_text()


def test_validation_stores_of_one_name_have_curves_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "validate", lambda *_, **__: {"loss": 1.0})
    run, stores = MagicMock(), dict.fromkeys(["wiki/val", "news/val", "work/web"])
    validation.validate_all(MagicMock(), run, stores, MagicMock())  # type: ignore[arg-type]
    tracked = [next(iter(call.args[1])) for call in run.run_log.track.call_args_list]
    assert tracked == ["validation/wiki/val/loss", "validation/news/val/loss", "validation/web/loss"]

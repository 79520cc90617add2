"""The record of a run: complete, and never in the way of the loop."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from terakoya.components import Tracker
from terakoya.training.record import Record

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
    record = Record(tmp_path, [Slow()], {}, active=True)
    start = time.perf_counter()
    for step in range(2000):
        record.track(step, {"loss": 1.0})
    assert time.perf_counter() - start < 1.0
    RELEASE.set()
    record.close()


def test_a_broken_tracker_is_named_once_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="terakoya"):
        record = Record(tmp_path, [Broken()], {}, active=True)
        for step in range(5):
            record.track(step, {"loss": 1.0})
        record.close()
    told = [message for message in caplog.messages if "Broken" in message]
    assert "ConnectionError: 401" in told[0]
    assert sum("is off for the rest" in message for message in told) == 1


def test_metrics_are_json_lines_even_when_a_number_is_none(tmp_path: Path) -> None:
    record = Record(tmp_path, [], {}, active=True)
    record.write("step", step=1, loss=float("nan"), grad_norm=2.0)
    record.warn("日本語", step=1)
    record.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["loss"] is None and first["grad_norm"] == 2.0 and first["kind"] == "step"
    assert second["text"] == "日本語" and second["kind"] == "warning"


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path, [Slow()], {}, active=False)
    record.write("step", step=1)
    record.track(1, {})
    record.close()
    assert not list(tmp_path.iterdir())

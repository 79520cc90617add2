"""Reading a run's metrics: complete, truncated, damaged, resumed, started and not started."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import damaged_records
import pytest
from selection import at_night

from terakoya.commands.status import render
from terakoya.errors import UserError
from terakoya.log import new_console
from terakoya.runs import metrics, status


def written(folder: Path, *records: dict[str, Any], end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + end, encoding="utf-8")
    return folder


def step(number: int, **values: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "tokens": 3600 * number, "tokens_per_second": 3600.0, **values}


def test_a_truncated_last_line_is_reported_and_the_lines_before_it_are_kept(tmp_path: Path) -> None:
    read = metrics.read(written(tmp_path / "run", step(1, loss=2.0), step(2, loss=1.0), end='\n{"kind": "step", "lo'))
    assert [record["step"] for record in read.records] == [1, 2] and read.unfinished
    half = '\n{"kind": "warning", "text": "語'.encode()[:-1]
    (tmp_path / "run" / "metrics.jsonl").write_bytes(json.dumps(step(1)).encode() + half)
    assert metrics.read(tmp_path / "run").unfinished
    assert not metrics.read(written(tmp_path / "run", step(1))).unfinished


def test_a_damaged_line_in_the_middle_is_skipped_and_reported(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    lines = [
        json.dumps(step(1)),
        "[3]",
        json.dumps(step(2)),
        '{"kind": "st{"kind": "resume"}',
        json.dumps(step(3)),
        "{",
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    read = metrics.read(folder)
    assert [record["step"] for record in read.records] == [1, 2, 3]
    assert (read.damaged, read.unfinished) == ((2, 4), True)
    assert read.problems() == [
        "line 2 of metrics.jsonl is damaged and skipped",
        "line 4 of metrics.jsonl is damaged and skipped",
        "the last line of metrics.jsonl is truncated",
    ]


def test_a_folder_without_a_run_and_a_run_without_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; expected the folder of a run"):
        metrics.read(tmp_path)
    (tmp_path / "run.lock").touch()
    assert metrics.read(tmp_path).records == ()


def test_curves_of_all_metrics(tmp_path: Path) -> None:
    checks = [
        {"kind": "validation", "step": 2, "store": store, "loss": value, "tokens": 7200}
        for store, value in (("a/val", 1.5), ("b/val", 1.25), ("c/wiki", 3.0))
    ]
    added = {"kind": "validation", "step": 2, "store": None, "bleu": 0.5, "tokens": 7200}
    read = metrics.read(written(tmp_path / "run", step(1, loss=2.0), step(2, loss=None), *checks, added))  # type: ignore[arg-type]
    curves = metrics.curves(read)
    assert curves.metric_names() == ["tokens_per_second", "loss", "bleu"]
    assert list(curves.of_metric("loss")) == [
        "loss", "validation a/val loss", "validation b/val loss", "validation wiki loss",
    ]  # fmt: skip
    assert curves.points["validation wiki loss"] == [(2, pytest.approx(2 / 3600), 3.0, 7200)]
    assert [point.step for point in curves.points["loss"]] == [1], "a missing value is not a point"


def test_the_curves_of_a_long_run_take_time_in_proportion_to_its_records() -> None:
    records = tuple(step(number, loss=1.0) for number in range(1, 30_001))
    began = time.process_time()
    points = metrics.curves(metrics.Metrics(records)).points["loss"]
    assert time.process_time() - began < 4, "every step compared with all before it takes far longer"
    assert points[-1] == (30_000, pytest.approx(30_000 / 3600), 1.0, 3600 * 30_000)


def test_of_a_repeated_step_the_last_record_counts(tmp_path: Path) -> None:
    again = [step(3, loss=9.0), {"kind": "resume", "step": 2}, step(3, loss=3.0), step(4, loss=2.0)]
    curves = metrics.curves(metrics.read(written(tmp_path / "run", step(1, loss=5.0), step(2, loss=4.0), *again)))
    assert [(point.step, point.value) for point in curves.points["loss"]] == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert [point.hours for point in curves.points["loss"]] == pytest.approx([n / 3600 for n in (1, 2, 3, 4)])
    assert curves.restarts == [(2, pytest.approx(2 / 3600))]


def test_a_fork_that_was_started_over_has_curves(tmp_path: Path) -> None:
    fork, over = {"kind": "fork", "step": 5, "tokens": 18_000}, {"kind": "resume", "step": 0, "folder": None}
    curves = metrics.curves(metrics.read(written(tmp_path / "run", fork, step(6, loss=9.0), over, step(1, loss=5.0))))
    assert curves.points["loss"] == [(1, pytest.approx(1 / 3600), 5.0, 3600)]


@pytest.mark.parametrize("stride", at_night([1, 7], always=[7]))
def test_a_value_of_another_type_is_a_damaged_line_and_never_a_traceback(stride: int, tmp_path: Path) -> None:
    """Each value of each kind of record is replaced by one of each other type, or is gone; by day every seventh."""
    folder = tmp_path / "run"
    for changed in itertools.islice(damaged_records.runs(folder), 0, None, stride):
        try:
            new_console().print(render([status.read(folder, now=2e9)]))
        except Exception as error:
            raise AssertionError(changed) from error
    written(folder, damaged_records.EVERY_KIND[1], {"kind": "step", "step": 2, "time": "x"})
    assert metrics.read(folder).problems() == ["line 2 of metrics.jsonl is damaged and skipped"]

"""Weights & Biases: the calls of its library and, if it is installed, the files that it writes offline."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from terakoya.errors import UserError
from terakoya.training.run_log import RunLog
from terakoya_plugins.trackers.wandb import WandB, run_id


class StandInRun:
    """A run as `wandb.init` returns it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[StandInRun]:
    """The runs that a stand-in for the library has opened."""
    opened: list[StandInRun] = []

    def init(**arguments: Any) -> StandInRun:
        opened.append(StandInRun(arguments))
        return opened[-1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Settings = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return opened


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path: Path, runs: list[StandInRun]) -> None:
    tracker = WandB(project="pre-training", entity="school", group="bert", tags=("ja", "small"), mode="offline")
    for values in ({"train/loss": 2.5}, {"train/loss": 1.5}):
        run_log = RunLog(tmp_path, [tracker], {"seed": 42}, active=True)
        run_log.track(7, values)
        run_log.close()
    first, second = runs
    asked = first.arguments
    assert (asked["project"], asked["entity"], asked["group"]) == ("pre-training", "school", "bert")
    assert (asked["tags"], asked["mode"], asked["name"]) == (["ja", "small"], "offline", tmp_path.name)
    assert asked["config"] == {"seed": 42} and asked["dir"] == str(tmp_path)
    assert asked["id"] == second.arguments["id"] == run_id(tmp_path) and asked["resume"] == "allow"
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": asked["id"]}
    assert first.logged == [{"train/loss": 2.5, "step": 7}] and second.logged == [{"train/loss": 1.5, "step": 7}]
    assert ("*", "step") in first.metrics and first.finished and second.finished
    assert run_id(tmp_path) != run_id(tmp_path.parent)


def test_without_the_library_training_continues_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"terakoya\[wandb\]"):
        WandB().open(tmp_path, {})
    run_log = RunLog(tmp_path, [WandB()], {}, active=True)
    run_log.track(1, {"train/loss": 2.5})
    run_log.write("step", step=1)
    run_log.close()
    assert any('pip install "terakoya[wandb]"' in message for message in caplog.messages)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_library_itself_writes_offline(tmp_path: Path) -> None:
    """In a separate process, as in a run: two starts have one id and a file each, and the process ends."""
    program = f"""
from pathlib import Path
from terakoya.training import run_log as run_log_module
from terakoya_plugins.trackers.wandb import WandB
run_log_module.SECONDS_TO_FINISH = 120.0  # the library's own process may take its time to start
for start in range(2):
    trackers = [WandB(mode="offline", tags=("ja",))]
    run_log = run_log_module.RunLog(Path({str(tmp_path)!r}), trackers, {{"seed": 42}}, active=True)
    run_log.track(start + 1, {{"train/loss": 2.5}})
    run_log.close()
"""
    environment = {**os.environ, "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert "off for the rest" not in done.stderr
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{run_id(tmp_path)}"} and all(file.stat().st_size for file in files)


def test_steps_after_going_back_are_in_another_wandb_run(tmp_path: Path, runs: list[StandInRun]) -> None:
    run_log = RunLog(tmp_path, [WandB(name="bert")], {}, active=True)
    for begins, attempt in ((0, 1), (3, 2)):
        run_log.begin_tracking(begins, attempt=attempt)
        run_log.track(begins + 1, {"train/loss": 2.5})
    run_log.close()
    first, second = runs
    assert [each.arguments["name"] for each in runs] == ["bert", "bert-attempt-2"] and first.finished
    assert first.arguments["id"] == run_id(tmp_path) != run_id(tmp_path, 2) == second.arguments["id"]
    assert [each.logged[0]["step"] for each in runs] == [1, 4] and len(second.metrics) == 2

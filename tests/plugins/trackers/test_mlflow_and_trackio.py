"""MLflow and Trackio: the calls of their libraries, and what the libraries write where they are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.components import Tracker
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.run_log import RunLog
from terakoya.training.setup import StartOptions
from terakoya_planning.dry_run import dry_run
from terakoya_plugins.trackers.mlflow import Mlflow
from terakoya_plugins.trackers.trackio import Trackio


class Client:
    """MLflow's client and server in one: keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_run(self, experiment: str, *, run_name: str) -> Any:
        self.calls.append(("create_run", (experiment, run_name), {}))
        run_id = ("abc123", "def456")[len(self.of("create_run")) - 1]
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> str:
            self.calls.append((name, arguments, options))
            return "experiment-7"

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    kept = Client()
    module = types.ModuleType("mlflow")
    module.MlflowClient = lambda tracking_uri: kept  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return kept


def log_once(tracker: Tracker, folder: Path, step: int) -> None:
    run_log = RunLog(folder, [tracker], {"seed": 42, "optimizer": {"learning_rate": 0.1}}, active=True)
    run_log.track(step, {"train/loss": 2.5})
    run_log.track(step, {"samples": "a → b"})
    run_log.close()


def test_a_resumed_run_continues_the_same_mlflow_run(tmp_path: Path, client: Client) -> None:
    for step in (10, 20):
        log_once(Mlflow(experiment="ja", name="bert"), tmp_path, step)
    assert client.of("create_run") == [(("experiment-7", "bert"), {})], "once"
    assert [arguments[1:] for arguments, _ in client.of("log_param")] == [
        ("seed", "42"),
        ("optimizer.learning_rate", "0.1"),
    ]
    assert client.of("log_metric") == [
        (("abc123", "train/loss", 2.5), {"step": 10}), (("abc123", "train/loss", 2.5), {"step": 20}),
    ]  # fmt: skip
    assert [arguments[2] for arguments, _ in client.of("log_text")] == [
        "parameters.json", "samples/step-00000010.txt", "samples/step-00000020.txt",
    ]  # fmt: skip
    assert client.of("set_terminated") == [(("abc123",), {})] * 2


def test_mlflow_gets_names_that_it_accepts(tmp_path: Path, client: Client) -> None:
    names = ("store (validation)", "s3://bucket/語", "../wiki.v2", "/data/a-b")
    Mlflow().open(tmp_path, {}).log(1, {f"validation/{name}/loss": 2.5 for name in names})
    assert [arguments[1].split("/", 1)[1] for arguments, _ in client.of("log_metric")] == [
        "store _validation_/loss", "s3_/bucket/語/loss", "_/wiki.v2/loss", "data/a-b/loss",
    ]  # fmt: skip


def go_back(tracker: Tracker, folder: Path) -> None:
    """Logs step 5, goes back to step 3 and logs steps 4 and 5; then is resumed at step 4, and once more before it went
    back, so that it does so again."""
    for attempts in ([(0, 1, [5]), (3, 2, [4, 5])], [(4, 2, [5])], [(2, 1, [3])]):
        run_log = RunLog(folder, [tracker], {}, active=True)
        for begins, attempt, steps in attempts:
            run_log.begin_tracking(begins, attempt=attempt)
            for step in steps:
                run_log.track(step, {"train/loss": 2.5})
        run_log.close()


def test_steps_after_going_back_are_in_another_mlflow_run(tmp_path: Path, client: Client) -> None:
    go_back(Mlflow(name="bert"), tmp_path)
    assert [arguments[1] for arguments, _ in client.of("create_run")] == ["bert", "bert-attempt-2"]
    assert [(arguments[0], options["step"]) for arguments, options in client.of("log_metric")] == [
        ("abc123", 5), ("def456", 4), ("def456", 5), ("def456", 5), ("abc123", 3),
    ]  # fmt: skip
    assert [arguments for arguments, _ in client.of("set_tag")][:3] == [
        ("def456", "terakoya.attempt", "2"), ("def456", "terakoya.first_attempt", "abc123"),
        ("abc123", "terakoya.undone_after_step", "3"),
    ]  # fmt: skip
    assert [arguments for arguments, _ in client.of("set_terminated")] == [
        ("abc123", "KILLED"), ("def456",), ("abc123", "KILLED"), ("def456",), ("abc123",),
    ]  # fmt: skip


def test_a_resume_does_not_change_where_an_mlflow_run_was_undone(tmp_path: Path, client: Client) -> None:
    go_back(Mlflow(name="bert"), tmp_path)
    undone = [arguments for arguments, _ in client.of("set_tag") if arguments[1] == "terakoya.undone_after_step"]
    assert undone == [("abc123", "terakoya.undone_after_step", "3")], "it resumes at step 4"


def test_steps_after_going_back_are_in_another_trackio_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, int]] = []

    class Run:
        def __init__(self, *, name: str, **_: Any) -> None:
            self.name = name

        def log(self, values: dict[str, float], *, step: int) -> None:
            logged.append((self.name, step))

        def finish(self) -> None:
            logged.append((self.name, -1))

    module = types.ModuleType("trackio")
    module.init = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    go_back(Trackio(name="a"), tmp_path)
    second = "a-attempt-2"
    assert logged == [
        ("a", 5), ("a", -1), (second, 4), (second, 5), (second, -1), ("a", -1), (second, 5), (second, -1), ("a", 3),
        ("a", -1),
    ]  # fmt: skip


def test_a_resumed_run_continues_the_trackio_run_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Run:
        def __init__(self, **arguments: Any) -> None:
            self.arguments, self.logged, self.finished = arguments, [], False
            opened.append(self)

        def log(self, values: dict[str, float], *, step: int) -> None:
            self.logged.append((step, values))

        def finish(self) -> None:
            self.finished = True

    module = types.ModuleType("trackio")
    module.init = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    for step in (10, 20):
        log_once(Trackio(project="ja"), tmp_path, step)
    first, second = opened
    assert first.arguments == second.arguments
    assert (first.arguments["project"], first.arguments["name"], first.arguments["resume"]) == (
        "ja", tmp_path.name, "allow",
    )  # fmt: skip
    assert first.logged == [(10, {"train/loss": 2.5})] and second.finished


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_a_dry_run_fails_without_the_library(
    name: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    raw = {**toy.parameters(store), "trackers": [{"type": name}]}
    with pytest.raises(UserError, match=rf'tracker {name}: .*; pip install "terakoya\[{name}\]"'):
        dry_run(Parameters.from_dict(raw, source="p.json"), tmp_path / "run", StartOptions())


def test_a_server_that_does_not_answer_does_not_block_training(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("terakoya.training.run_log.SECONDS_TO_FINISH", 0.3)
    monkeypatch.setattr(Client, "create_run", lambda self, *_, **__: threading.Event().wait())
    run_log = RunLog(tmp_path, [Mlflow()], {}, active=True)
    run_log.track(1, {"train/loss": 2.5})
    run_log.close()
    assert any("Mlflow fell behind" in message for message in caplog.messages)


ENVIRONMENT = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
"""MLflow writes into a folder only where this says so; its data base needs more than mlflow-skinny."""
PROGRAM = """
import os, sys
from pathlib import Path
folder = Path({folder!r})
os.chdir(folder)
os.environ["TRACKIO_DIR"] = str(folder / "trackio")
from terakoya.training import run_log as run_log_module
from terakoya_plugins.trackers.{name} import {kind}
run_log_module.SECONDS_TO_FINISH = 100.0
for step in (1, 2):
    run_log = run_log_module.RunLog(folder, [{kind}({settings})], {{"seed": 42}}, active=True)
    run_log.track(step, {{"train/loss": 2.5}})
    run_log.close()
"""


def run_library(folder: Path, **fields: str) -> None:
    """In a process of its own, as the libraries start threads and servers."""
    program = PROGRAM.format(folder=str(folder), **fields)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0 and "off for the rest" not in done.stderr, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_itself_keeps_both_starts_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    address = f"file://{tmp_path / 'mlruns'}"
    run_library(tmp_path, name="mlflow", kind="Mlflow", settings=f"tracking_uri={address!r}")
    client = MlflowClient(tracking_uri=address)
    (run,) = client.search_runs([client.get_experiment_by_name("terakoya").experiment_id])
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    assert run.info.status == "FINISHED" and run.data.params["seed"] == "42"


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_itself_keeps_both_starts_in_one_run(tmp_path: Path) -> None:
    run_library(tmp_path, name="trackio", kind="Trackio", settings="")
    assert list((tmp_path / "trackio").glob("*.db"))

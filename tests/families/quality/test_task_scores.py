"""Scores of checkpoints that a process beside the run measures, and a run that takes the same steps with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import toy
from labelled_examples import classified, write
from safetensors.torch import load_file

from terakoya import evaluate, plugins, train
from terakoya.components.progress import Length
from terakoya.conversion.export import export
from terakoya.errors import UserError

SUITE = """
name: Toys
url: https://example.com/toys
settings: {learning_rates: [1e-2], epochs: [1], batch_size: 8, seeds: 1, max_length: 24}
tasks:
  toy_labels:
    title: Toy labels
    task: classification
    files: {train: train.jsonl, eval: eval.jsonl}
    scores: [accuracy]
"""


@pytest.mark.usefixtures("forks")
def test_the_scores_are_those_of_evaluate_and_the_run_is_the_same(tmp_path: Path) -> None:
    for number, name in enumerate(("train", "eval")):
        write(tmp_path / f"{name}.jsonl", classified(32, number))
    suite = tmp_path / "toys.yaml"
    suite.write_text(SUITE)
    store = toy.make_store(tmp_path / "store", documents=60, seed=1)
    settings = {"tasks": str(suite), "data": str(tmp_path), "every": 4, "limit": None}
    fixed: dict[str, Any] = {"checkpoint": {"save_steps": 2}, "max_steps": 4}
    train(toy.parameters(store, **fixed, events={"task_scores": settings}), tmp_path / "run")
    train(toy.parameters(store, **fixed), tmp_path / "plain")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (scored,) = [record for record in records if record["kind"] == "task_scores"]
    export(tmp_path / "plain", tmp_path / "model")
    expected = evaluate(tmp_path / "model", stores=[tmp_path], tasks=[str(suite)], tuning={"seeds": 1})
    scores = expected.finetuned["toy_labels"]["scores"]["eval"]
    assert scored["scored_step"] == 4
    assert scored["scores"] == {f"toy_labels eval {name}": each["mean"] for name, each in scores.items()}
    ours, plain = (
        load_file(tmp_path / name / "checkpoints/step-00000004/model/model.safetensors") for name in ("run", "plain")
    )
    assert ours.keys() == plain.keys() and all((ours[name] == plain[name]).all() for name in ours)
    assert [path.name for path in (tmp_path / "run/task_scores").iterdir()] == ["step-00000004.json"]


class Run(SimpleNamespace):
    """A run on one rank that keeps what is written and printed."""

    def write(self, kind: str, **values: Any) -> None:
        self.records.append((kind, values))

    def print(self, text: str) -> None:
        self.printed.append(text)

    warn = print


class Case:
    """A listener whose processes run `code`, with the checkpoint and the file for scores as arguments."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        component = plugins.registry().component("events", "task_scores")
        monkeypatch.setattr(
            component, "command", lambda _, checkpoint, out: [sys.executable, "-c", code, str(checkpoint), str(out)]
        )
        self.run: Any = Run(rank=0, step=0, folder=tmp_path, records=[], printed=[], ended_by="enough")
        self.listener = component(tasks="x", data=str(tmp_path), every=10).start(self.run)
        self.listener.run_started(self.run)

    def save(self, step: int) -> Path:
        checkpoint: Path = self.run.folder / f"checkpoints/step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(str(step))
        self.listener.checkpoint_saved(self.run, checkpoint)
        return checkpoint

    def finish(self, error: BaseException | None = None) -> None:
        self.listener.run_finished(self.run, error)


SCORE = """
import json, pathlib, sys
step = int((pathlib.Path(sys.argv[1]) / "manifest.json").read_text())
mean = {"accuracy": {"mean": step / 100}}
pathlib.Path(sys.argv[2]).write_text(json.dumps({"finetuned": {"t": {"scores": {"eval": mean}}}}))
"""


def test_the_newest_of_those_that_become_due_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "import pathlib, sys, time\nwhile not (pathlib.Path(sys.argv[2]).parent / 'go').exists(): time.sleep(0.01)"
    case = Case(tmp_path, monkeypatch, wait + SCORE)
    for step in (10, 15, 20, 30):
        case.save(step)
    (tmp_path / "task_scores/go").touch()
    case.finish()
    assert case.run.records == [
        ("task_scores", {"scored_step": step, "scores": {"t eval accuracy": step / 100}}) for step in (10, 30)
    ]
    assert "events.task_scores: step 10 takes long; step-00000020 is passed over" in case.run.printed
    assert not [path for path in (tmp_path / "task_scores").iterdir() if path.is_dir()]


def test_a_score_that_is_not_defined_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correlation with predictions that are all equal."""
    case = Case(tmp_path, monkeypatch, SCORE.replace("step / 100", "None"))
    case.save(10)
    case.finish()
    assert case.run.records == [("task_scores", {"scored_step": 10, "scores": {"t eval accuracy": None}})]
    assert case.run.printed[-1] == "scores of step 10: t eval accuracy undefined"


def test_a_checkpoint_may_be_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, "import time; time.sleep(0.2)" + SCORE)
    checkpoint = case.save(10)
    (checkpoint / "manifest.json").unlink()
    case.finish()
    assert case.run.records[0][1]["scores"] == {"t eval accuracy": 0.1}


def test_a_process_that_fails_says_why_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "import sys\nif '00010' in sys.argv[1]: sys.exit('error: no such task')"
    case = Case(tmp_path, monkeypatch, fails + SCORE)
    case.save(10)
    case.listener.process.wait()
    case.run.step = 20
    case.listener.step_finished(case.run, None)
    assert case.run.printed == ["events.task_scores: step 10 has no scores: error: no such task"]
    case.save(20)
    case.finish()
    assert [values["scored_step"] for _, values in case.run.records] == [20]


def test_a_run_that_fails_stops_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, "import time; time.sleep(600)")
    case.save(10)
    process, began = case.listener.process, time.monotonic()
    case.finish(RuntimeError())
    assert process.returncode is not None and time.monotonic() - began < 60
    assert (tmp_path / "task_scores/step-00000010").is_dir()
    case.listener.run_started(case.run)
    assert not (tmp_path / "task_scores/step-00000010").exists()


def test_a_run_that_is_stopped_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, "import time; time.sleep(600)")
    case.run.ended_by, case.run.length, case.run.consumed_tokens = None, Length(steps=20, tokens=100), 50
    case.save(10)
    began = time.monotonic()
    case.finish()
    assert time.monotonic() - began < 60
    assert case.run.printed == ["events.task_scores: the run stops before step 10 has its scores"]


BESIDE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from terakoya_quality.task_scores import TaskScores
TaskScores.command = lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"]
run = SimpleNamespace(rank=0, step=10, folder=Path("."), print=print)
listener = TaskScores(tasks="x", data=".", every=10).start(run)
listener.checkpoint_saved(run, Path("checkpoints/step-00000010"))
print(listener.process.pid, flush=True)
time.sleep(600)
"""


def test_the_process_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000010").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", BESIDE], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        process = psutil.Process(int(run.stdout.readline()))
        run.kill()
    gone, _ = psutil.wait_procs([process], timeout=20)
    assert gone


def test_ctrl_c_while_the_run_waits_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, "import time; time.sleep(600)")
    case.save(10)
    process = case.listener.process

    def interrupt(text: str) -> None:
        if "waits" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(case.run, "print", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        case.finish()
    assert process.returncode is not None


def test_data_that_is_not_there_is_said_before_the_first_step(tmp_path: Path) -> None:
    component = plugins.registry().component("events", "task_scores")
    with pytest.raises(UserError, match=r"data: .*nowhere: expected the folder of the tasks' files, found none"):
        component(tasks="x", data=str(tmp_path / "nowhere"), every=10).start(SimpleNamespace(rank=0))


def test_the_process_is_no_part_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code = "import os, pathlib, sys, json; pathlib.Path('environment.json').write_text(json.dumps(dict(os.environ)))"
    session = "pathlib.Path('/proc/self/autogroup')"  # where Linux shares time among sessions
    code = f"{code}; session = {session}.read_text().split()[-1] if {session}.exists() else 19"
    case = Case(tmp_path, monkeypatch, f"{code}; sys.exit(f'{{os.getpriority(os.PRIO_PROCESS, 0)}} {{session}}')")
    monkeypatch.chdir(tmp_path)
    case.save(10)
    case.finish()
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert not {"RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["PATH"] == os.environ["PATH"]
    assert case.run.printed[-1].endswith("no scores: 19 19")


def test_other_ranks_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, SCORE)
    case.run.rank = 1
    case.save(10)
    case.finish()
    assert not (tmp_path / "task_scores").exists()


def test_it_must_fall_on_saved_steps() -> None:
    component = plugins.registry().component("events", "task_scores")
    parameters = SimpleNamespace(checkpoint=SimpleNamespace(save_steps=4))
    with pytest.raises(UserError, match=r"every: expected a multiple of checkpoint\.save_steps, 4; got 10"):
        component(tasks="x", data="x", every=10).check(parameters)

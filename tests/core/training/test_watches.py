"""What a plugin watches by a key of the parameters is asked in every step, recorded, and missed by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.plugins import load, registry
from terakoya.plugins.discovery import WITHOUT_VARIABLE
from terakoya.plugins.run_record import record_plugins
from terakoya.training.setup import train_in_this_process

pytestmark = pytest.mark.usefixtures("fresh_plugins")

STRANGE = """
from terakoya import hookimpl
from terakoya.training.step_health import StepJudge
from terakoya.training.watches import StepTimer

class Timer(StepTimer):
    def __init__(self, run, batches):
        self.run = run
    def end(self, step):
        self.run.write("strange", ended=step)

class Judge(StepJudge):
    def __init__(self, run, batches):
        self.losses = []
    def skip_above(self, step):
        return 0.0 if step == 2 else 1e9
    def judge(self, health, step, loss):
        health.note(step, "spike", f"{step.left_out} {loss:.4f}", signal="loss")

@hookimpl
def register_watches():
    return {"profile": Timer, "spikes": Judge}
"""


def train(store: Path, out: Path, **changes: Any) -> list[dict[str, Any]]:
    settings = toy.parameters(store, max_steps=4, logging_steps=1, **changes)
    train_in_this_process(Parameters.from_dict(settings, source="run"), out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_strange_watch_times_and_judges_each_step(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "strange.py"
    file.write_text(STRANGE, encoding="utf-8")
    load([str(file)], ["watch"])
    records = train(store, tmp_path / "run", profile={"steps": [1, 2]})
    assert [each["ended"] for each in records if each["kind"] == "strange"] == [1, 2, 3, 4]
    losses = {each["step"]: each["loss"] for each in records if each["kind"] == "step"}
    judged = {each["step"]: each["text"] for each in records if each["kind"] == "spike"}
    assert judged == {step: f"{step == 2} {loss:.4f}" for step, loss in losses.items()}
    (recorded,) = record_plugins(registry(), {"spikes": {}, "profile": None})
    assert (recorded["name"], recorded["components"]) == ("strange", ["watches/spikes"])


def test_a_run_without_the_family_looks_for_no_spikes_and_names_it_where_more_is_asked(
    store: Path, tmp_path: Path
) -> None:
    load(without=["watch"])
    assert all(each["kind"] != "spike" for each in train(store, tmp_path / "plain"))
    for key, value in {"profile": {"steps": [1, 2]}, "spikes": {"action": "rollback"}}.items():
        with pytest.raises(UserError, match=f"{key}: no plugin has what .*; it belongs to the family watch"):
            train(store, tmp_path / key, **{key: value})


def test_two_processes_train_without_the_family(store: Path, tmp_path: Path) -> None:
    for name, environment in (("with", {}), ("without", {WITHOUT_VARIABLE: "watch"})):
        settings = toy.parameters(store, batch_size={"0": 9, "1": 7}, max_steps=3)
        toy.train(settings, tmp_path / name, nodes=(1, 1), environment=environment)
    assert toy.losses(tmp_path / "without") == toy.losses(tmp_path / "with")

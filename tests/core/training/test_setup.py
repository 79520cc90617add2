"""Weights depend only on the seed; a run can be resumed by a version with more settings; what will not be trained is
told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy

import terakoya
from terakoya.config.parameters import Parameters
from terakoya.plugins import PluginError, registry
from terakoya.runs import checkpoints
from terakoya.store.token_store import TokenStore
from terakoya.training.model.build import build_module
from terakoya.training.setup import train_in_this_process


def test_weights_are_initialised_after_seeding(store: Path) -> None:
    vocabulary = TokenStore.open(store).facts.vocabulary

    def build(seed: int) -> torch.Tensor:
        torch.rand(7)  # random numbers that were drawn before
        module = build_module(Parameters.from_dict(toy.parameters(store, seed=seed), source="test"), vocabulary)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))


@pytest.mark.slow
def test_a_setting_that_did_not_exist_counts_as_unchanged(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=1)
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path)
    (manifest,) = tmp_path.glob("checkpoints/*/manifest.json")
    written = json.loads(manifest.read_text())
    del written["parameters"]["schedule"]["simultaneous"]
    manifest.write_text(json.dumps(checkpoints.with_hash(written)))
    train_in_this_process(Parameters.from_dict({**settings, "max_steps": 2}, source="test"), tmp_path)
    assert max(toy.records(tmp_path)) == 2


@pytest.mark.parametrize(
    ("rows", "phases", "told"), [(32, None, False), (16, None, True), (16, 32, False)], ids=["all", "some", "later"]
)
def test_positions_that_no_row_reaches_are_told(
    rows: int, phases: int | None, told: bool, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = toy.parameters(store, max_steps=2)
    settings["data"]["sequence_length"] = rows
    if phases is not None:
        settings["phases"] = [{"share": 0.5}, {"share": 0.5, "data": {"sequence_length": phases}}]
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path)
    assert ("positions from there to 32 stay random" in capsys.readouterr().err.replace("\n", " ")) is told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_steps": 2}, "of 4 steps ends after the 2 that are trained: the learning rate reaches 50% of its peak"),
        ({"max_steps": 4}, None),
        ({"max_steps": 2, "phases": [{"steps": 1}, {"steps": 1, "schedule": {"type": "constant"}}]}, "of 4 steps ends"),
        (
            {"max_steps": 6, "phases": [{"steps": 4}, {"steps": 2, "schedule": {"type": "linear", "warmup_steps": 3}}]},
            "warm-up of 3 steps ends after the 2 that",
        ),
    ],
)
def test_a_warmup_that_does_not_end_is_told(
    changes: dict[str, Any], told: str | None, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_in_this_process(Parameters.from_dict(toy.parameters(store, **changes), source="test"), tmp_path)
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("the warm-up of") == (told is not None) and (told or "") in said


@pytest.mark.parametrize(("schedule", "told"), [
    ({"type": "constant"}, "ends at 100% of its peak: a trunk"),
    ({"type": "cosine", "min_lr": 5e-4}, "ends at 50% of its peak: a trunk"),
    ({"type": "cosine", "min_lr": 1e-4}, None), ({"type": "linear"}, None), ({"type": "plateau"}, None),
])  # fmt: skip
def test_a_learning_rate_that_stays_high_is_told(
    schedule: dict[str, Any], told: str | None, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = toy.parameters(store, schedule=schedule, optimizer={"type": "adamw", "learning_rate": 1e-3}, max_steps=1)
    if schedule["type"] == "plateau":
        raw |= {"evaluation": {"steps": 1, "batches": 1}, "data": raw["data"] | {"validation": [str(store)]}}
    train_in_this_process(Parameters.from_dict(raw, source="test"), tmp_path)
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("the learning rate ends") == (told is not None) and (told or "") in said


@pytest.mark.slow
def test_what_ended_a_run_is_its_error_also_where_a_plugin_fails_at_its_end(store: Path, tmp_path: Path) -> None:
    """The exit code says whether a launcher starts the run again."""

    def interrupt(run: Any, report: Any) -> None:
        raise KeyboardInterrupt

    def fail(run: Any, error: BaseException | None) -> None:
        raise OSError("the diary is full")

    parameters = Parameters.from_dict(toy.parameters(store, max_steps=2), source="test")
    with pytest.raises(KeyboardInterrupt):
        terakoya.train(parameters, tmp_path / "run", events={"step_finished": interrupt, "run_finished": fail})
    assert "the diary is full" in (tmp_path / "run/metrics.jsonl").read_text()
    with pytest.raises(PluginError, match="the diary is full"):
        terakoya.train(parameters, tmp_path / "run", events={"run_finished": fail})


def test_a_plugin_that_fails_at_the_end_of_a_run_keeps_no_other_from_it() -> None:
    told: list[object] = []

    def fail(run: Any, error: BaseException | None) -> None:
        raise OSError("the diary is full")

    def tell(run: Any, error: BaseException | None) -> None:
        told.append(error)

    events = registry().hook.with_functions({"run_finished": fail}).with_functions({"run_finished": tell})
    with pytest.raises(PluginError, match="the diary is full"):
        events.run_finished(SimpleNamespace(), None)  # type: ignore[arg-type]
    assert told == [None]

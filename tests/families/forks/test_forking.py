"""Forks of a run: their steps, what they may change, and what is left of them when the parent goes."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from terakoya.atomic_files import FileFacts
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.runs import forks, metrics, status
from terakoya.runs.checkpoints import find_problems, read_manifest
from terakoya_forks import fork as forking
from terakoya_forks.fork import fork

pytestmark = pytest.mark.slow

WSD = {"type": "warmup_stable_decay", "warmup_steps": 2, "decay_steps": 3}
DECAY = ("max_steps=9", "schedule.decay_steps=4", "optimizer.learning_rate=0.003", "seed=7")
KEYS = ("optimizer.learning_rate", "schedule.decay_steps", "seed")
STEP = "checkpoints/step-{:08d}".format


def settings(store: Path, validation: Path | None = None, **changes: Any) -> dict[str, Any]:
    checkpoint = {"save_steps": 5, "keep": 3, "model": "last"}
    return toy.parameters(store, validation, schedule=WSD, checkpoint=checkpoint, **changes)


def train(parameters: dict[str, Any] | Path, out: Path, *allow_change: str) -> None:
    from terakoya.launch.here import train as run

    run(parameters, out, allow_change=allow_change)


@pytest.fixture(scope="module")
def trunk(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trunk") / "run"
    train(settings(store, validation_store), out)
    return out


def assert_same_end(one: Path, other: Path, step: int) -> None:
    """The losses after step 5 and the whole state at `step` are bit-identical."""
    losses = [{at: loss for at, loss in toy.losses(each).items() if at > 5} for each in (one, other)]
    assert losses[0] == losses[1] and max(losses[0]) == step
    for kind in ("model", "optimizer"):
        states = [toy.saved(each / STEP(step), kind) for each in (one, other)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_unchanged_fork_takes_the_steps_of_its_parent_which_may_be_gone(trunk: Path, tmp_path: Path) -> None:
    parent, new = tmp_path / "parent", tmp_path / "new"
    shutil.copytree(trunk, parent)
    manifest = parent / STEP(5) / "manifest.json"
    facts = fork(Path(f"{parent}@5"), new)
    assert facts == forks.read_fork(new)
    assert (facts.run, facts.step, facts.changed) == (str(parent), 5, ())
    assert facts.manifest == FileFacts.of(manifest).sha256
    assert manifest.samefile(new / STEP(5) / "manifest.json")  # a second name, no second file
    shutil.rmtree(parent)
    assert find_problems(new / STEP(5)) == []
    before = status.read(new)
    assert (before.state, before.step, before.forked_from) == ("not started", 5, f"{parent} at step 5")

    train(new / "parameters.json", new)
    assert_same_end(new, trunk, 12)
    validated = [{at: each["loss"] for at, each in toy.records(run, "validation").items()} for run in (new, trunk)]
    assert validated[0] == {at: loss for at, loss in validated[1].items() if at > 5} and validated[0]
    last = read_manifest(new / STEP(12))
    assert last["forked_from"] == facts.model_dump(mode="json") | {"changed": []}
    assert (last["consumed_rows"], last["consumed_tokens"]) == tuple(
        read_manifest(trunk / STEP(12))[key] for key in ("consumed_rows", "consumed_tokens")
    )
    after = status.read(new)
    assert (after.state, after.restarts, after.forked_from) == ("finished", 0, before.forked_from)
    steps = [toy.records(trunk)[5], *(each for _, each in sorted(toy.records(new).items()))]
    seconds = sum((after["tokens"] - each["tokens"]) / after["tokens_per_second"] for each, after in pairwise(steps))
    curve = metrics.curves(metrics.read(new)).points["loss"]
    assert curve[-1].hours == pytest.approx(seconds / 3600) and curve[-1].tokens == steps[-1]["tokens"]


@pytest.mark.nightly
def test_a_hundred_steps_of_an_unchanged_fork_are_those_of_its_parent(store: Path, tmp_path: Path) -> None:
    trunk, new = tmp_path / "trunk", tmp_path / "new"
    train({**settings(store, max_steps=105), "checkpoint": {"save_steps": 5, "keep": 21, "model": "last"}}, trunk)
    fork(Path(f"{trunk}@5"), new)
    train(new / "parameters.json", new)
    assert_same_end(new, trunk, 105)
    assert len(toy.losses(new)) == 100


def test_changes_are_those_of_a_resume_that_allows_them(trunk: Path, tmp_path: Path) -> None:
    new, resumed = tmp_path / "new", tmp_path / "resumed"
    assert fork(trunk / STEP(5), new, DECAY).changed == KEYS
    shutil.copytree(trunk / STEP(5), resumed / STEP(5))
    parameters = json.loads((new / "parameters.json").read_text())
    with pytest.raises(UserError, match=r"other values of optimizer\.learning_rate, schedule\.decay_steps, seed;"):
        train(parameters, resumed)
    train(parameters, resumed, *KEYS)
    train(new / "parameters.json", new)
    assert_same_end(new, resumed, 9)
    rates = [each["learning_rate"] for _, each in sorted(toy.records(new).items())]
    assert rates == sorted(rates, reverse=True) and rates[0] < 0.003 / 0.99 and rates[-1] < 0.0006  # it decays

    # the changes are agreed to at the fork alone
    parameters["seed"] = 8
    with pytest.raises(UserError, match="--allow-change seed"):
        train({**parameters, "max_steps": 10}, new)
    # and a fork of a fork knows the nearest parent
    assert fork(new, tmp_path / "again", ["max_steps=11"]).run == str(new)


def test_another_mixture_is_checked_when_the_fork_is_made(
    trunk: Path, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    mixed = json.dumps([{"store": str(store), "weight": 1.0}, {"store": str(validation_store), "weight": 3.0}])
    new = tmp_path / "new"
    assert (
        "data"
        in fork(Path(f"{trunk}@10"), new, [f"data.train={mixed}", "data.validation=[]", "evaluation=null"]).changed
    )
    train(new / "parameters.json", new)
    positions = read_manifest(new / STEP(12))["positions"]
    assert [int(each["rows"]) > 0 for each in positions] == [True, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("batch_size.-1=8", "batch_size: expected 16 rows a step, as in the checkpoint, got 8"),
        ("architecture.hidden_size=32", "a run cannot change the sizes of its model"),
        ("architecture.num_hidden_layers=3", r"the model would have other weights than the checkpoint \(.*layer\.2\."),
        ('optimizer={"type":"lion","learning_rate":0.001}', r"other values of optimizer\.type, which determine"),
        ("start_from=model", "start_from: cannot change in a fork"),
        ("max_steps=5", "max_steps: expected more than the 5 steps of the checkpoint, got 5"),
        ('data.train=["missing"]', "missing: expected a finished token store, got no such folder"),
        ("optimizer.learning_rat=1", "unknown key"),
        ("lora={}", "lora"),
    ],
)
def test_what_cannot_change_is_refused_before_anything_is_written(
    change: str, said: str, trunk: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said) as refused:
        fork(Path(f"{trunk}@5"), tmp_path / "new", [change])
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_is_named(trunk: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for source, said in {
        f"{trunk}@7": "no checkpoint of step 7; its checkpoints are of 5, 10, 12",
        f"{trunk}@x": "expected the step of a checkpoint after @, got 'x'",
        f"{tmp_path}/no@5": "expected a run, got no such folder",
        f"{trunk}": "max_steps: expected more than the 12 steps",
    }.items():
        with pytest.raises(UserError, match=said):
            fork(Path(source), new)
    damaged = tmp_path / "damaged"
    shutil.copytree(trunk, damaged)
    (damaged / STEP(5) / "state/model-00000.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"damaged: state/model-00000\.safetensors: 0 bytes"):
        fork(Path(f"{damaged}@5"), new)
    assert not new.exists()
    with pytest.raises(UserError, match="already exists and is not empty"):
        fork(Path(f"{trunk}@5"), damaged)
    with pytest.raises(UserError, match="no checkpoint of step 6; its checkpoints are of 5, 10, 12"):
        export(Path(f"{trunk}@6"), new)


def test_a_checkpoint_that_its_run_removes_meanwhile(
    trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, link = tmp_path / "parent", forking.link_file
    shutil.copytree(trunk, parent)

    def remove_then_link(source: Path, target: Path) -> None:
        (parent / STEP(5) / "manifest.json").unlink(missing_ok=True)
        link(source, target)

    monkeypatch.setattr(forking, "link_file", remove_then_link)
    with pytest.raises(UserError, match="its run removed this checkpoint just now"):
        fork(Path(f"{parent}@5"), tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["parent"]


def test_a_fork_never_begins_at_step_0_and_its_record_is_checked(trunk: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    fork(Path(f"{trunk}@5"), new)
    shutil.rmtree(new / STEP(5))
    with pytest.raises(UserError, match=r"fork\.json says that it began at step 5 of another run"):
        train(new / "parameters.json", new)
    (new / "fork.json").write_text((new / "fork.json").read_text().replace('"step": 5', '"step": 6'))
    with pytest.raises(UserError, match=r"fork\.json: damaged: content changed since it was written"):
        forks.read_fork(new)
    assert any("fork.json: damaged" in problem for problem in status.read(new).problems)


@pytest.mark.nightly
@pytest.mark.parametrize("background", [False, True])
def test_two_processes_fork_bit_for_bit(store: Path, tmp_path: Path, background: bool) -> None:
    rows, checkpoint = {"0": 9, "1": 7}, {"save_steps": 5, "keep": 3, "async_save": background}
    parameters = {**settings(store, batch_size=rows, max_steps=20), "checkpoint": checkpoint}
    toy.train(parameters, tmp_path / "run", nodes=(1, 1))
    fork(Path(f"{tmp_path}/run@10"), tmp_path / "new")
    shutil.rmtree(tmp_path / "run" / STEP(10))
    toy.train(parameters, tmp_path / "new", nodes=(1, 1))
    assert_same_end_from(tmp_path / "new", tmp_path / "run")


def assert_same_end_from(new: Path, run: Path) -> None:
    losses = {at: loss for at, loss in toy.losses(run).items() if at > 10}
    assert toy.losses(new) == losses and max(losses) == 20
    for kind in ("model", "optimizer"):
        mine, theirs = toy.saved(new / STEP(20), kind), toy.saved(run / STEP(20), kind)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

"""The bundled event plugins: what they keep and when they end a run, and that training is the same with them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy
from saved_weights import FAULTS, same_weights
from selection import at_night
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.runs import files
from terakoya.toolkit.checkpoint_copies import copy_checkpoint, finish_copy
from terakoya.toolkit.validation_metrics import BestValue, FollowsMetric, choose_mode, is_better, read_metric
from terakoya_checks.verify import verify


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("events")
    return (
        toy.make_store(folder / "train", documents=150, seed=1),
        toy.make_store(folder / "validation", documents=30, seed=2),
    )


ALL: dict[str, Any] = {
    "best_checkpoint": {"metric": "masked_accuracy"},
    "ema": {"decay": 0.9},
    "early_stopping": {"patience": 50},
    "permanent_checkpoints": {"every": 5},
    "save_on_demand": {"every_seconds": 0},
}


def lines(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without times and rates, which no two runs have in common."""
    timed = {"time", "tokens_per_second", "samples_per_second", "tflops", "mfu", "slowest_rank", "slowest_rank_excess"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: each[key] for key in each if key not in timed} for each in records if each["kind"] in kinds]


@pytest.mark.parametrize("processes", at_night([1, 2], always=[1]))
def test_training_is_the_same_with_them_bit_for_bit(processes: int, stores: tuple[Path, Path], tmp_path: Path) -> None:
    table = {"-1": 16} if processes == 1 else {"0": 9, "1": 7}
    settings = toy.parameters(*stores, evaluation={"steps": 2, "batches": 1}, batch_size=table)
    nodes = (1,) * processes
    toy.train(settings, tmp_path / "without", nodes=nodes)
    toy.train({**settings, "events": ALL}, tmp_path / "with", nodes=nodes)
    assert lines(tmp_path / "with", "step", "validation") == lines(tmp_path / "without", "step", "validation")
    assert same_weights(tmp_path / "with", tmp_path / "without", 12)


@pytest.mark.nightly
def test_a_killed_run_with_them_goes_on_as_one_that_was_not(stores: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed after step 9: its best validation is saved between two regular checkpoints."""
    settings = toy.parameters(*stores, evaluation={"steps": 2, "batches": 1}, events=ALL)
    toy.train(settings, tmp_path / "straight", plugins=FAULTS)
    environment = {"FAULT": "kill:9", "FAULT_RANK": "0"}
    toy.train(settings, tmp_path / "cut", plugins=FAULTS, environment=environment, code=None)
    toy.train(settings, tmp_path / "cut", plugins=FAULTS)
    assert same_weights(tmp_path / "cut", tmp_path / "straight", 12)
    best = [json.loads((tmp_path / run / "model-best" / "best.json").read_text()) for run in ("straight", "cut")]
    assert best[0] == best[1]
    manifests = [
        json.loads((tmp_path / run / "checkpoints" / "step-00000012" / "manifest.json").read_text())["events"]
        for run in ("straight", "cut")
    ]
    assert manifests[0] == manifests[1] and set(manifests[0]) == {"best_checkpoint", "early_stopping", "ema"}
    averages = [tmp_path / run / "checkpoints/step-00000012/events/ema.safetensors" for run in ("straight", "cut")]
    assert averages[0].read_bytes() == averages[1].read_bytes()


def test_the_best_checkpoint_stays_and_is_a_whole_checkpoint(stores: tuple[Path, Path], tmp_path: Path) -> None:
    """The highest loss counts as the best here: it comes early, and `keep` would remove its checkpoint."""
    settings = toy.parameters(
        *stores, max_steps=24, evaluation={"steps": 2, "batches": 2}, checkpoint={"save_steps": 4, "keep": 2},
        events={"best_checkpoint": {"mode": "max"}, "permanent_checkpoints": {"every": 8}},
    )  # fmt: skip
    toy.train(settings, tmp_path / "run")
    found = {each["step"]: each["loss"] for each in lines(tmp_path / "run", "validation") if each["step"]}
    best = max((step for step in found), key=lambda step: found[step])
    facts = json.loads((tmp_path / "run" / "model-best" / "best.json").read_text())
    assert (facts["metric"], facts["value"], facts["step"]) == ("loss", pytest.approx(found[best]), best)
    assert best < 20 and not (tmp_path / "run" / "checkpoints" / f"step-{best:08d}").exists()
    assert not verify(tmp_path / "run" / "model-best").problems
    assert (tmp_path / "run" / "model-best" / "model" / "config.json").is_file()
    kept = sorted(path.name for path in (tmp_path / "run" / "permanent").iterdir())
    assert kept == ["step-00000008", "step-00000016", "step-00000024"]
    assert not [problem for name in kept for problem in verify(tmp_path / "run" / "permanent" / name).problems]


@pytest.mark.parametrize("processes", at_night([1, 2], always=[1]))
def test_early_stopping_ends_the_run_as_if_it_had_its_length(
    processes: int, stores: tuple[Path, Path], tmp_path: Path
) -> None:
    """A learning rate of nearly nothing: no validation is better than the first by 0.5."""
    table = {"-1": 16} if processes == 1 else {"0": 9, "1": 7}
    settings = toy.parameters(
        *stores, max_steps=100, optimizer={"type": "adamw", "learning_rate": 1e-9}, batch_size=table,
        evaluation={"steps": 3, "batches": 1}, checkpoint={"save_steps": 50, "model": "last"},
        events={"early_stopping": {"patience": 2, "min_delta": 0.5}},
    )  # fmt: skip
    printed = toy.train(settings, tmp_path / "run", nodes=(1,) * processes)
    assert "ended at step 6: early_stopping: loss has not improved in 2 validations" in printed
    (end,) = lines(tmp_path / "run", "finished")
    assert end["step"] == 6 and end["reason"].startswith("early_stopping")
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / "model" / "config.json").is_file()
    again = toy.train(settings, tmp_path / "run", nodes=(1,) * processes)
    assert "ended at step 6" in again and [each["step"] for each in lines(tmp_path / "run", "step")][-1] == 6
    settings["events"] = {"early_stopping": {"patience": 3, "min_delta": 0.5}}
    more = toy.train(settings, tmp_path / "run", nodes=(1,) * processes)
    assert "ended at step 9" in more, "more patience goes on from where the run was"


@pytest.mark.nightly
def test_losses_on_other_rows_are_not_compared(stores: tuple[Path, Path], tmp_path: Path) -> None:
    """The first validation store is the training store: a run that goes on with another would never be as good."""
    settings = toy.parameters(
        stores[0], stores[0], max_steps=12, evaluation={"steps": 3, "batches": 2},
        events={"early_stopping": {"patience": 1}, "best_checkpoint": {"mode": "max"}},
    )  # fmt: skip
    run = tmp_path / "run"
    assert "anew" not in toy.train(settings, run)
    settings["data"]["validation"] = [str(stores[1])]
    printed = toy.train({**settings, "max_steps": 24}, run)
    assert "early_stopping: its metric, the rows" in printed and "best_checkpoint: its metric, the rows" in printed
    losses = {each["step"]: each["loss"] for each in lines(run, "validation")}
    new = [losses[step] for step in (15, 18, 21, 24)]
    assert new == sorted(new, reverse=True), "the loss falls, so that the run does not stop"
    facts = json.loads((run / "model-best" / "best.json").read_text())
    assert (facts["step"], facts["value"]) == (15, pytest.approx(losses[15])), "the worst of the new ones"


@pytest.mark.nightly
def test_a_fork_of_a_run_that_stopped_early_trains(stores: tuple[Path, Path], tmp_path: Path) -> None:
    settings = toy.parameters(
        *stores, max_steps=100, optimizer={"type": "adamw", "learning_rate": 1e-9},
        evaluation={"steps": 2, "batches": 1}, events={"early_stopping": {"patience": 2, "min_delta": 0.5}},
    )  # fmt: skip
    assert "ended at step 4: early_stopping" in toy.train(settings, tmp_path / "run")
    made = CliRunner().invoke(build_app(), ["fork", str(tmp_path / "run"), "--out", str(tmp_path / "fork")])
    assert made.exit_code == 0, made.output
    settings = json.loads((tmp_path / "fork" / "parameters.json").read_text())
    for _ in range(2):  # the second time it has stopped early itself
        assert "ended at step 8: early_stopping" in toy.train(settings, tmp_path / "fork")


def test_a_save_is_requested_from_outside(stores: tuple[Path, Path], tmp_path: Path) -> None:
    """Two processes: rank 0 finds the request, both save."""
    settings = toy.parameters(*stores, max_steps=100_000, checkpoint={"save_steps": 100_000}, evaluation=None)
    settings["batch_size"] = {"0": 2, "1": 2}
    run = tmp_path / "run"
    started = toy.start(settings, run, nodes=(1, 1))
    try:
        deadline = time.monotonic() + 100
        while not ((run / "metrics.jsonl").is_file() and lines(run, "step")):
            assert time.monotonic() < deadline and all(each.running() for each in started)
            time.sleep(0.1)
        done = CliRunner().invoke(build_app(), ["save", str(run)])
        assert done.exit_code == 0, (done.output, done.exception)
        (saved,) = (run / "checkpoints").glob("step-*")
        assert saved.name in "".join(done.output.split())
        assert all(each.running() for each in started) and not (run / "save.request").exists()
        os.kill(started[0].pid, 15)
        toy.finish(started, code=75)
    finally:
        for each in started:
            each.process.kill()
    with pytest.raises(UserError, match=r"no process trains here.*its last checkpoint is step-"):
        CliRunner().invoke(build_app(), ["save", str(run)], catch_exceptions=False)


def test_a_run_that_ends_before_it_saves_is_told_from_one_that_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "parameters.json").write_text("{}")
    asked: list[bool] = []

    def read_lock(folder: Path) -> SimpleNamespace:
        asked.append((folder / "save.request").exists())
        return SimpleNamespace(held=len(asked) < 3)

    monkeypatch.setattr(files, "read_lock", read_lock)
    with pytest.raises(UserError, match=r"the run ended before it saved; `terakoya status"):
        CliRunner().invoke(build_app(), ["save", str(run)], catch_exceptions=False)
    assert asked == [False, True, True] and not (run / "save.request").exists()


# -------------------------------------------------------------------------------------------------------- settings


def parameters(**changes: Any) -> Parameters:
    return Parameters.from_dict({**toy.parameters(Path("store"), Path("validation")), **changes}, source="a.json")


def test_settings_are_checked_with_the_parameters() -> None:
    chosen = parameters(events={"early_stopping": {"patience": 3}, "save_on_demand": None})
    assert (
        chosen.dump()["events"]["early_stopping"]["patience"] == 3 and chosen.dump()["events"]["save_on_demand"] is None
    )
    assert Parameters.from_dict(chosen.dump(), source="b.json") == chosen
    for events, message in (
        ({"early_stoping": {}}, r'a.json: events.early_stoping: event early_stoping: not installed.*"early_stopping"'),
        (
            {"early_stoping": None},
            r'a.json: events.early_stoping: event early_stoping: not installed.*"early_stopping"',
        ),
        ({"early_stopping": {"patience": 0}}, r"a.json: events.early_stopping.patience: "),
        ({"early_stopping": {"patienc": 2}}, r'a.json: events.early_stopping.patienc: unknown key.*"patience"'),
        ({"permanent_checkpoints": {"every": 7}}, r"events.permanent_checkpoints.every: .*save_steps, 5; got 7"),
        ([], r"a.json: events: expected"),
    ):
        with pytest.raises(UserError, match=message):
            parameters(events=events)
    with pytest.raises(UserError, match=r"events.best_checkpoint.metric: the run does not validate"):
        parameters(events={"best_checkpoint": {}}, evaluation=None)
    data = {"train": ["store"], "split": [98, 2], "sequence_length": 32}
    assert parameters(events={"best_checkpoint": {}, "early_stopping": {}}, data=data).data.has_validation


def test_a_metric_is_read_from_one_store_or_from_all() -> None:
    values = {"a/wiki": {"loss": 2.0, "masked_accuracy": 0.5}, "b/web": {"loss": 4.0}, "": {"f1": 0.25}}
    assert read_metric(values, "loss", None) == 3.0 and read_metric(values, "loss", "web") == 4.0
    assert read_metric(values, "loss", "a/wiki") == 2.0 and read_metric(values, "f1", None) == 0.25
    with pytest.raises(UserError, match="no accuracy on wiki; it has f1, loss, masked_accuracy; stores: a/wiki, b/web"):
        read_metric(values, "accuracy", "wiki")
    assert (choose_mode("masked_accuracy", None), choose_mode("loss", None), choose_mode("loss", "max")) == (
        "max", "min", "max",
    )  # fmt: skip


def test_a_best_value_counts_only_for_the_objective_that_it_was_measured_with() -> None:
    causal = {"type": "causal_lm", "head_positions": 64}
    falling = {"type": "masked_lm", "mlm_probability": {"start": 0.3, "end": 0.2}}
    longer = {"train": ["store"], "validation": ["validation"], "sequence_length": 16}

    def follow(**changes: Any) -> BestValue:
        run: Any = SimpleNamespace(parameters=parameters(**changes), validation_rows="a")
        return BestValue(FollowsMetric(), run)

    def begins_anew(before: dict[str, Any], **changes: Any) -> bool:
        best = follow(**changes)
        best.load(json.loads(json.dumps(before)))
        return best.begins_anew

    facts = follow().facts()
    for changes in ({"objective": {"type": "masked_lm", "mlm_probability": 0.4}}, {"seed": 7}, {"data": longer}):
        assert begins_anew(facts, **changes), changes
    assert not begins_anew(facts) and not begins_anew(facts, objective=falling), "validation masks as at its end"
    del facts["measured_with"]
    assert not begins_anew(facts, seed=7), "an older checkpoint does not say"
    gpt2 = {"type": "gpt2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    facts = follow(architecture=gpt2, objective=causal).facts()
    assert not begins_anew(facts, architecture=gpt2, objective={**causal, "head_positions": None})


def test_better_is_better_by_more_than_the_margin_and_never_nan() -> None:
    assert is_better(1.0, None, "min") and not is_better(float("nan"), None, "min")
    assert is_better(1.0, 1.2, "min", min_delta=0.1) and not is_better(1.0, 1.05, "min", min_delta=0.1)
    assert is_better(1.0, 0.8, "max") and not is_better(0.8, 0.8, "max")


def test_a_copy_that_was_interrupted_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    source, target = tmp_path / "step-00000001", tmp_path / "best"
    (source / "state").mkdir(parents=True)
    (source / "state" / "model").write_text("one")
    copy_checkpoint(source, target, more={"best.json": "{}"})
    assert (target / "state" / "model").samefile(source / "state" / "model") and (target / "best.json").is_file()
    target.rename(tmp_path / ".old-best")  # killed between the two renames
    (tmp_path / ".new-best").mkdir()
    finish_copy(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000001"]
    assert (target / "state" / "model").read_text() == "one"

"""A step whose loss or gradients are not finite is skipped, on all ranks alike; stopping changes nothing about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
import torch
import toy
from killed_here import Killed, train
from saved_weights import FAULTS, same_weights, weights
from selection import at_night
from start_folders import save_bert

from terakoya.errors import Diverged
from terakoya.training.step_health import PendingStep, StepHealth
from terakoya_watch.spike_judge import note
from terakoya_watch.spikes import Spike

NAN, INF = float("nan"), float("inf")
EVENTS = ("skipped", "spike")
ELECTRA = {
    "architecture": {
        "type": "electra", "embedding_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32,
    },
    "objective": {"type": "replaced_token", "generator_size": "1/2"},
}  # fmt: skip


def events(out: Path) -> list[tuple[Any, ...]]:
    """The records of skipped steps and spikes, each once, in the order of their steps."""
    found = set()
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in EVENTS:
            found.add(tuple(str(record.get(name)) for name in ("step", "kind", "signal", "value", "limit", "text")))
    return sorted(found, key=lambda event: (int(event[0]), event))


def skipped(out: Path) -> list[int]:
    return sorted(toy.records(out, "skipped"))


def bad(*steps: int, factor: float = NAN, added: float = 0.0) -> Callable[[Any], None]:
    return lambda run: faults.spoil(run, range(steps[0], steps[-1] + 1), factor, added)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "added"), at_night([(NAN, 0.0), (INF, 0.0), (1.0, INF)], always=[(1.0, INF)]))
def test_a_bad_step_changes_no_weight_and_its_rows_stay_consumed(
    factor: float, added: float, store: Path, tmp_path: Path
) -> None:
    """A loss that is infinite while its gradients are finite is skipped, too."""
    settings = toy.parameters(store, max_steps=5, logging_steps=5, checkpoint={"save_steps": 1, "keep": 9})
    train(settings, tmp_path / "run", bad(3, factor=factor, added=added))
    assert skipped(tmp_path / "run") == [3]
    record = toy.records(tmp_path / "run", "skipped")[3]
    assert record["rows"] == [32, 48] and record["reason"] == "not finite"
    assert f"rows 32 to 47 of the training order (32 to 47 of {store})" in record["text"]
    assert same_weights(tmp_path / "run", tmp_path / "run", 2)
    before, after, next_one = (weights(tmp_path / "run", step) for step in (2, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(after[name], next_one[name]) for name in after)
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000005/manifest.json").read_text())
    assert manifest["consumed_rows"] == 80 and manifest["step_health"]["skipped"] == 1


@pytest.mark.slow
def test_the_logged_loss_is_the_mean_of_the_steps_that_count(store: Path, tmp_path: Path) -> None:
    """Every step of a frozen model has its own loss: the mean of three of them is that without the second."""
    settings = toy.parameters(store, max_steps=3, checkpoint={"save_steps": 9})
    settings["architecture"] = toy.without_dropout(settings["architecture"])
    settings["optimizer"] = {"type": "adamw", "learning_rate": 1e-12, "weight_decay": 0.0}
    train(settings, tmp_path / "each", bad(2))
    each = toy.records(tmp_path / "each")
    assert each[2]["loss"] is None and each[2]["grad_norm"] is None, "a step that was skipped has no loss"
    train({**settings, "logging_steps": 3}, tmp_path / "all", bad(2))
    mean = toy.records(tmp_path / "all")[3]["loss"]
    low, high = sorted((each[1]["loss"], each[3]["loss"]))
    assert low <= mean <= high and each[1]["loss"] != each[3]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("allowed", at_night((0, 2), always=(2,)))
def test_too_many_in_a_row_end_the_run_a_step_later_and_say_where(allowed: int, store: Path, tmp_path: Path) -> None:
    """However rarely the run logs. A good step between bad ones starts the count anew."""
    settings = toy.parameters(
        store, logging_steps=100, max_consecutive_skipped_steps=allowed, max_steps=100, checkpoint={"save_steps": 100}
    )
    taken: list[int] = []

    def spoil(run: Any) -> None:
        bad(5, 100)(run)
        if allowed:
            bad(3)(run)
        forward = run.module.forward
        run.module.forward = lambda batch: (taken.append(run.step + 1), forward(batch))[1]

    with pytest.raises(Diverged) as error:
        train(settings, tmp_path / "run", spoil)
    last = 5 + allowed
    assert max(taken) == last + 1, "one step is under way when the numbers of the step before it are read"
    assert error.value.exit_code == 3
    message = str(error.value)
    steps = f"{allowed + 1} step{'s' if allowed else ''}"
    assert f"step {last}: loss or gradients were not finite in {steps} in a row" in message
    assert f"rows {16 * (last - 1)} to {16 * last - 1} of the training order" in message and str(store) in message
    assert f'{{"skip_steps": [[5, {last}]]}}' in message
    assert skipped(tmp_path / "run") == [3] * bool(allowed) + list(range(5, last + 1))
    passed = {**settings, "data": {**settings["data"], "skip_steps": [[5, 100]]}}
    train(passed, tmp_path / "run", spoil)  # what the message suggests


VARIANTS: dict[str, dict[str, Any]] = {
    "bert": {"micro_batch_size": 5},
    "electra": ELECTRA,
    "fp16": {"precision": "fp16", "loss_scaling": {"init_scale": 2.0**10}},
    "lora": {"lora": {"r": 4, "lora_alpha": 8}, "optimizer": {"type": "adamw", "learning_rate": 0.05}},
    "validation": {"evaluation": {"steps": 3, "batches": 2}, "schedule": {"type": "plateau", "patience": 1}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", VARIANTS)
def test_killed_and_resumed_around_bad_steps_and_a_spike_is_bit_identical(
    name: str, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """A checkpoint just after the first bad step, before its numbers were read, another in the middle of two."""
    settings = toy.parameters(store, max_steps=30, logging_steps=4, checkpoint={"save_steps": 6}, **VARIANTS[name])
    if name == "lora":
        save_bert(tmp_path / "start")
        settings["start_from"] = str(tmp_path / "start")
    if name == "validation":
        settings["data"]["validation"] = [str(validation_store), str(store)]

    def spoil(run: Any) -> None:
        bad(6)(run)
        bad(12, 13)(run)
        bad(20, factor=400.0)(run)
        bad(24, factor=500.0)(run)

    for out in ("straight", "cut"):
        for kill in (8, 13, 26) if out == "cut" else ():
            with pytest.raises(Killed):
                train(settings, tmp_path / out, spoil, kill_in_step=kill)
        train(settings, tmp_path / out, spoil)
    assert len(toy.records(tmp_path / "cut", "resume")) == 3
    assert skipped(tmp_path / "straight") == [6, 12, 13]
    spikes = [event for event in events(tmp_path / "straight") if event[1] == "spike"]
    assert {event[0] for event in spikes} >= {"20"}
    assert events(tmp_path / "cut") == events(tmp_path / "straight")
    assert toy.losses(tmp_path / "cut") == toy.losses(tmp_path / "straight")
    assert same_weights(tmp_path / "cut", tmp_path / "straight", 30)
    kept = [
        json.loads((tmp_path / out / "checkpoints/step-00000030/manifest.json").read_text())["step_health"]
        for out in ("cut", "straight")
    ]
    assert kept[0] == kept[1] and kept[0]["skipped"] == 3


@pytest.mark.slow
def test_a_spike_may_be_left_out(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(
        store, max_steps=26, logging_steps=13, checkpoint={"save_steps": 1, "keep": 30}, spikes={"action": "skip"}
    )
    train(settings, tmp_path / "run", bad(20, factor=300.0))
    record = toy.records(tmp_path / "run", "spike")[20]
    assert record["signal"] in ("loss", "grad_norm") and record["skipped"]
    before, after, next_one = (weights(tmp_path / "run", step) for step in (19, 20, 21))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(after[name], next_one[name]) for name in after)
    assert not skipped(tmp_path / "run")
    assert math.isfinite(toy.records(tmp_path / "run")[26]["loss"])


def test_a_rate_of_30_is_found_within_two_steps(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, max_steps=4, schedule={"type": "constant"})
    settings["optimizer"] = {"type": "adamw", "learning_rate": 30.0}
    train(settings, tmp_path / "run")
    assert min(toy.records(tmp_path / "run", "spike")) == 2


@pytest.mark.nightly
def test_one_rank_decides_for_all_and_a_kill_changes_nothing(store: Path, tmp_path: Path) -> None:
    """The loss of one process is not finite, or a spike of the sum; the other dies."""
    settings = toy.parameters(
        store, batch_size={"0": 9, "1": 7}, logging_steps=3, checkpoint={"save_steps": 7}, max_steps=14
    )
    nodes = (1, 1)
    environment = {"FAULT": "spoil:7-8", "ADDED": "inf", "FAULT_RANK": "1"}
    output = toy.train(settings, tmp_path / "straight", nodes=nodes, plugins=FAULTS, environment=environment)
    assert "warning: step 7: loss or gradients are not finite, and no weight has changed; it took rows 96 to" in output
    killed = {**environment, "FAULT_KILL": "10"}
    toy.train(settings, tmp_path / "cut", plugins=FAULTS, nodes=nodes, environment=killed, code=None)
    assert max(toy.records(tmp_path / "cut")) < 14
    toy.train(settings, tmp_path / "cut", nodes=nodes, plugins=FAULTS, environment=environment)
    assert skipped(tmp_path / "straight") == [7, 8] and "resume" in (tmp_path / "cut/metrics.jsonl").read_text()
    assert events(tmp_path / "cut") == events(tmp_path / "straight")
    assert toy.losses(tmp_path / "cut") == toy.losses(tmp_path / "straight")
    assert same_weights(tmp_path / "cut", tmp_path / "straight", 14)


GPT2 = {
    "architecture": {
        "type": "gpt2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    "objective": {"type": "causal_lm"},
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"engine": "fsdp"},
    **{f"zero {stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "tensor": {"tp_size": 2},
    "pipeline": {"pp_size": 2},
    "sequence": {"sp_size": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_skips_alike(engine: str, precision: str, store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(
        store, max_steps=12, parallel=ENGINES[engine], precision=precision, logging_steps=4,
        loss_scaling={"init_scale": 2.0**10} if precision == "fp16" else None,
        **(GPT2 if engine == "pipeline" else {}),
    )  # fmt: skip
    nodes = (2,)
    environment = {"FAULT": "spoil:6-7", "FACTOR": "nan", "FAULT_RANK": "1"}
    every = {**settings, "checkpoint": {"save_steps": 1, "keep": 12}}
    toy.train(every, tmp_path / "straight", nodes=nodes, plugins=FAULTS, environment=environment)
    assert skipped(tmp_path / "straight") == [6, 7]
    before, first, second, after = (weights(tmp_path / "straight", step) for step in (5, 6, 7, 8))
    assert all(torch.equal(before[name], bad[name]) for bad in (first, second) for name in before)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for save_steps, kill in ((6, "8"), (5, "7")):
        settings = {**settings, "checkpoint": {"save_steps": save_steps}}
        out = tmp_path / f"cut{save_steps}"
        killed = {**environment, "FAULT_KILL": kill}
        toy.train(settings, out, plugins=FAULTS, nodes=nodes, environment=killed, code=None)
        toy.train(settings, out, nodes=nodes, plugins=FAULTS, environment=environment)
        assert "resume" in (out / "metrics.jsonl").read_text()
        assert events(out) == events(tmp_path / "straight")
        assert toy.losses(out) == toy.losses(tmp_path / "straight")
        assert same_weights(out, tmp_path / "straight", 12)


@pytest.mark.parametrize(
    ("signal", "left_out", "printed"), [("loss", False, 1), ("grad_norm", False, 0), ("grad_norm", True, 1)]
)
def test_a_spike_is_recorded_and_printed_where_it_matters(signal: Any, left_out: bool, printed: int) -> None:
    """A norm that is high once is usual while a model learns fast."""
    said: list[str] = []
    records: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(active=False, print=said.append, write=lambda kind, **values: records.append(values))
    health = object.__new__(StepHealth)
    health.run_log, health.anomalies = log, []
    health.run = SimpleNamespace(folder="work/run")  # type: ignore[assignment]
    health.batches = SimpleNamespace(describe_rows=lambda *_: "rows 32 to 47")  # type: ignore[assignment]
    note(health, PendingStep(3, (32, 48), left_out=left_out), Spike(signal, 9.0, 1.0, 2.0))
    assert len(said) == printed and all("report work/run" in line for line in said)
    assert [each["text"].endswith("the step took rows 32 to 47") for each in records] == [True]
    assert [each.kind for each in health.anomalies] == ["spike"]

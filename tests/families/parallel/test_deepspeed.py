"""DeepSpeed's stages train what one process trains, and any engine reads their checkpoints.

One pair of processes runs every job: rank 0 has 5 rows of each step, rank 1 has 2, in micro-steps of 2, so that rank 1
runs two empty ones. The model's sizes are odd, so that none is divisible by two.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from engine_runs import (
    HALF,
    LAST,
    LION,
    MIDDLE,
    STAGES,
    UNVALIDATED,
    assert_close,
    assert_same_losses,
    checkpoint,
    here,
    run_in_a_new_process,
    settings,
    start,
    state,
)
from selection import at_night, wanted

from terakoya.errors import UserError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

RECOMPUTED = {"selective": 2, "full": 3}
EACH = at_night(STAGES, always=(2, 3))
LAST_ONE = at_night(STAGES, always=(3,))


UNCORRECTED: dict[str, Any] = {"type": "adamw", "learning_rate": 0.01, "bias_correction": False}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The folder of all runs, and the output of the processes."""
    stages = wanted(request, "stage")
    base = tmp_path_factory.mktemp("deepspeed")
    one, two = {"-1": 7}, {"0": 5, "1": 2}

    def job(name: str, stage: int, rows: dict[str, int] = two, **changes: Any) -> dict[str, Any]:
        extra = {key: changes.pop(key) for key in ("start_from", "poison") if key in changes}
        out = str(base / name)
        return {"out": out, "settings": settings(store, validation_store, stage, rows, **changes), **extra}

    def from_step(name: str) -> str:
        return str(checkpoint(base / name, MIDDLE))

    plain = settings(store, validation_store, None, one)
    here(base / "plain", plain)
    here(base / "plain_bf16", {**plain, **UNVALIDATED, "precision": "bf16", "autocast": True})
    here(base / "plain_uncorrected", {**plain, **UNVALIDATED, "optimizer": UNCORRECTED})
    here(base / "plain_fp16", {**plain, **HALF})
    here(base / "plain_lion", {**plain, **LION})
    jobs = []
    for stage in stages:
        jobs.append(job(f"stage{stage}", stage))
        jobs.append(job(f"resumed{stage}", stage, start_from=from_step(f"stage{stage}")))
        jobs.append(job(f"poison{stage}", stage, start_from=from_step(f"stage{stage}"), poison=True))
        jobs.append(job(f"from_plain{stage}", stage, start_from=from_step("plain"), **UNVALIDATED))
    for stage in wanted(request, "stage", "test_bf16_is_autocast_over_fp32_weights"):
        jobs.append(job(f"bf16_{stage}", stage, precision="bf16", max_steps=MIDDLE, evaluation=None))
    for stage in wanted(request, "stage", "test_fp16_scales_losses_as_without_deepspeed"):
        jobs.append(job(f"fp16_{stage}", stage, **HALF))
    for stage in {3, *wanted(request, "stage", "test_lion_takes_the_same_steps_when_sharded")}:
        jobs.append(job(f"lion{stage}", stage, **LION))
    for kind in wanted(request, "kind"):
        stage = RECOMPUTED[kind]
        jobs.append(job(f"{kind}{stage}", stage, activation_checkpointing=kind, evaluation=None))
    jobs.append(job("lion_resumed3", 3, start_from=from_step("lion3"), **LION))
    for stage in wanted(request, "stage", "test_without_bias_correction_the_step_count_is_kept"):
        jobs.append(job(f"uncorrected{stage}", stage, optimizer=UNCORRECTED, **UNVALIDATED))
        jobs.append(
            job(
                f"uncorrected_resumed{stage}", stage,
                optimizer=UNCORRECTED, start_from=from_step(f"uncorrected{stage}"), **UNVALIDATED,
            )
        )  # fmt: skip
    alone = [job("alone3", 3, one, start_from=from_step("plain"), **UNVALIDATED)]
    pair = start(jobs, base / "pair", 2)
    said = run_in_a_new_process(alone, base / "alone.json")
    toy.finish(pair)
    said += "".join(process.output.read_text() for process in pair)
    for stage in stages:
        here(base / f"to_plain{stage}", {**plain, **UNVALIDATED}, checkpoint(base / f"stage{stage}", MIDDLE))
    return base, said


@pytest.mark.slow
@pytest.mark.parametrize("stage", EACH)
def test_a_stage_trains_what_one_process_trains(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    assert_same_losses(base / "plain", base / f"stage{stage}", 1e-6)
    assert_close(state(base / "plain", "model", MIDDLE), state(base / f"stage{stage}", "model", MIDDLE), 1e-6)
    assert_close(state(base / "plain", "model"), state(base / f"stage{stage}", "model"), 1e-6)
    # moments are averages of gradients; the largest of them say how exact gradients are
    assert_close(state(base / "plain", "optimizer"), state(base / f"stage{stage}", "optimizer"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", EACH)
def test_validation_is_the_same(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    plain, mine = (toy.records(base / name, "validation") for name in ("plain", f"stage{stage}"))
    assert plain.keys() == mine.keys() == {0, MIDDLE, LAST}
    for step in plain:
        for value in ("loss", "masked_accuracy"):
            assert mine[step][value] == pytest.approx(plain[step][value], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", EACH)
def test_resumed_in_the_same_world_is_bit_identical(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    straight, resumed = base / f"stage{stage}", base / f"resumed{stage}"
    assert set(toy.losses(resumed)) == set(range(MIDDLE + 1, LAST + 1))
    assert_same_losses(straight, resumed, 0.0)
    for kind in ("model", "optimizer"):
        assert_close(state(straight, kind), state(resumed, kind), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night((1, 3), always=(3,)))
def test_without_bias_correction_the_step_count_is_kept(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    resumed = base / f"uncorrected_resumed{stage}"
    assert_same_losses(base / "plain_uncorrected", base / f"uncorrected{stage}", 1e-5)
    assert_same_losses(base / f"uncorrected{stage}", resumed, 0.0)
    assert_close(state(base / f"uncorrected{stage}", "model"), state(resumed, "model"), 0.0)
    steps = {float(value) for name, value in state(resumed, "optimizer").items() if name.endswith("/step")}
    assert steps == {1e8}


@pytest.mark.slow
@pytest.mark.parametrize("stage", EACH)
def test_checkpoints_move_between_engines(runs: tuple[Path, str], stage: int) -> None:
    """From one process without DeepSpeed to a stage on two, and back."""
    base, _ = runs
    for name in (f"from_plain{stage}", f"to_plain{stage}"):
        assert set(toy.losses(base / name)) == set(range(MIDDLE + 1, LAST + 1))
        assert_same_losses(base / "plain", base / name, 1e-5)
        assert_close(state(base / "plain", "model"), state(base / name, "model"), 1e-5)


@pytest.mark.slow
def test_one_process_without_a_launcher(runs: tuple[Path, str]) -> None:
    base, _ = runs
    assert_same_losses(base / "plain", base / "alone3", 1e-5)
    assert_close(state(base / "plain", "model"), state(base / "alone3", "model"), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", LAST_ONE)
def test_bf16_is_autocast_over_fp32_weights(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    mine = toy.losses(base / f"bf16_{stage}")
    for step, values in mine.items():
        assert values == pytest.approx(toy.losses(base / "plain_bf16")[step], rel=1e-2)
    weights = state(base / f"bf16_{stage}", "model", MIDDLE)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert_close(state(base / "plain_bf16", "model", MIDDLE), weights, 1e-2)
    fp32 = toy.losses(base / f"stage{stage}")
    assert any(abs(mine[step][0] - fp32[step][0]) > 1e-5 for step in mine), "the run computed in fp32"


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night(STAGES, always=(2,)))
def test_fp16_scales_losses_as_without_deepspeed(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    plain, mine = (toy.records(base / name) for name in ("plain_fp16", f"fp16_{stage}"))
    course = [(2.0**16, 1)] * LAST
    for records in (plain, mine):
        assert [(each["loss_scale"], each["skipped_steps"]) for each in records.values()] == course
        assert records[1]["grad_norm"] is None
    for step in range(1, LAST + 1):
        assert mine[step]["loss"] == pytest.approx(plain[step]["loss"], rel=1e-2)
        assert step == 1 or mine[step]["grad_norm"] == pytest.approx(plain[step]["grad_norm"], rel=1e-2)
    weights = state(base / f"fp16_{stage}", "model")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert_close(state(base / "plain_fp16", "model"), weights, 1e-2)
    written = json.loads((checkpoint(base / f"fp16_{stage}", LAST) / "manifest.json").read_text())
    assert written["loss_scaling"]["scale"] == 2.0**16


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_activation_checkpointing_changes_no_bit(runs: tuple[Path, str], kind: str) -> None:
    base, _ = runs
    stage = RECOMPUTED[kind]
    assert_same_losses(base / f"stage{stage}", base / f"{kind}{stage}", 0.0)
    for part in ("model", "optimizer"):
        assert_close(state(base / f"stage{stage}", part), state(base / f"{kind}{stage}", part), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", LAST_ONE)
def test_lion_takes_the_same_steps_when_sharded(runs: tuple[Path, str], stage: int) -> None:
    """Lion's updates are signs: where a gradient is nearly zero, rounding may flip one."""
    base, _ = runs
    assert_same_losses(base / "plain_lion", base / f"lion{stage}", 1e-4)
    plain, mine = state(base / "plain_lion", "model"), state(base / f"lion{stage}", "model")
    learnt = [name for name in plain if not name.endswith("key.bias")]  # whose gradient is 0, so its sign is rounding
    apart = sum(int(((plain[name] - mine[name]).abs() > 1e-6).sum()) for name in learnt)
    assert apart <= sum(plain[name].numel() for name in learnt) / 1000
    assert state(base / f"lion{stage}", "optimizer").keys() == state(base / "plain_lion", "optimizer").keys()


@pytest.mark.slow
def test_lion_resumed_is_bit_identical(runs: tuple[Path, str]) -> None:
    base, _ = runs
    assert_same_losses(base / "lion3", base / "lion_resumed3", 0.0)
    for part in ("model", "optimizer"):
        assert_close(state(base / "lion3", part), state(base / "lion_resumed3", part), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", EACH)
def test_a_step_that_is_not_finite_changes_nothing(runs: tuple[Path, str], stage: int) -> None:
    base, _ = runs
    bad = {"finite": False, "stayed": True}
    assert json.loads((base / f"poison{stage}/poison.json").read_text()) == [
        bad,
        bad,
        {"finite": True, "stayed": False},
    ]


@pytest.mark.slow
def test_deepspeed_prints_only_skipped_steps(runs: tuple[Path, str]) -> None:
    _, said = runs
    lines = [line for line in said.splitlines() if "[WARNING]" in line or "[INFO]" in line or "Warning:" in line]
    assert all("OVERFLOW! Skipping step" in line for line in lines), said


def test_missing_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from terakoya_parallel.deepspeed_setup import import_deepspeed, launcher_variables

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    before = dict(os.environ)
    with launcher_variables(0, 1, 0), pytest.raises(UserError, match=r"pip install .terakoya\[deepspeed\]"):
        import_deepspeed()
    assert dict(os.environ) == before

"""fp16: the scale follows the published rules, all processes skip the same steps, stopping changes nothing."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from killed_runs import kill_and_resume
from safetensors.torch import load_file

from terakoya.config.loss_scaling import LossScaling
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya.training.engines.loss_scaling import MAX_CONSECUTIVE_OVERFLOWS, LossScaler
from terakoya.training.model.build import build_module
from terakoya.training.setup import train_in_this_process

CPU = torch.device("cpu")
GPT2 = {
    "type": "gpt2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
T5 = {"type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
SPANS = {"type": "span_corruption", "mean_noise_span_length": 6.0}
HUGE = 2.0**40
"""A scale at which the gradients of every model overflow."""


def overflows(count: int, share: float) -> list[bool]:
    """Whether each of `count` steps overflows: a fraction `share` of them does."""
    draw = random.Random(3)
    return [draw.random() < share for _ in range(count)]


@pytest.mark.parametrize(("interval", "share"), [(4, 0.2), (1, 0.5), (2000, 0.1)])
def test_the_scale_is_that_of_torch(interval: int, share: float) -> None:
    mine = LossScaler(LossScaling(init_scale=1024.0, growth_interval=interval, min_scale=1e-30), CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for bad in overflows(60, share):
        assert float(mine.scale) == float(theirs.scale(torch.ones(())))
        assert float(mine.inverse) == 1.0 / float(mine.scale)
        weight.grad = torch.tensor([math.inf if bad else 1.0])
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        mine.update(torch.tensor(math.inf if bad else 1.0))


@pytest.mark.parametrize(("hysteresis", "least"), [(1, 64.0), (2, 0.25), (3, 512.0)])
def test_hysteresis_and_lowest_scale_are_those_of_megatron(hysteresis: int, least: float) -> None:
    """Megatron-LM's rule, written out."""
    settings = LossScaling(init_scale=4096.0, growth_interval=3, hysteresis=hysteresis, min_scale=least)
    scaler = LossScaler(settings, CPU)
    scale, left, good, skipped, seen = 4096.0, hysteresis, 0, 0, set()
    for bad in overflows(200, 0.45):
        scaler.update(torch.tensor(math.nan if bad else 2.0))
        if bad:
            good, left, skipped = 0, left - 1, skipped + 1
            if left <= 0:
                scale = max(scale * 0.5, least)
        else:
            good += 1
            if good == 3:
                good, left, scale = 0, hysteresis, scale * 2.0
        assert scaler.log_values() == {"loss_scale": scale, "skipped_steps": skipped}
        seen.add(scale)
    assert len(seen) > 3 and least in seen


def test_the_scale_does_not_grow_beyond_float32() -> None:
    scaler = LossScaler(LossScaling(init_scale=2.0**126, growth_interval=1), CPU)
    for _ in range(3):
        scaler.update(torch.tensor(1.0))
    assert float(scaler.scale) == 2.0**127


def test_a_state_survives_json() -> None:
    settings = LossScaling(init_scale=64.0, growth_interval=5, hysteresis=2)
    straight, cut = LossScaler(settings, CPU), LossScaler(settings, CPU)
    steps = overflows(40, 0.3)
    for number, bad in enumerate(steps):
        for scaler in (straight, cut):
            scaler.update(torch.tensor(math.inf if bad else 1.0))
        if number % 7 == 3:
            state, cut = json.loads(json.dumps(cut.state())), LossScaler(settings, CPU)
            cut.load(state)
        assert cut.log_values() == straight.log_values()


def test_an_overflow_at_the_lowest_scale_ends_the_run() -> None:
    scaler = LossScaler(LossScaling(init_scale=4.0), CPU)
    for _ in range(2):
        scaler.update(torch.tensor(math.inf))
        scaler.raise_if_stuck(7)
    assert float(scaler.scale) == 1.0
    scaler.update(torch.tensor(math.inf))
    with pytest.raises(
        UserError, match=r"step 7: gradients overflowed fp16 at loss scale 1, the lowest .* 3 steps were"
    ):
        scaler.raise_if_stuck(7)


def test_a_fixed_scale_stays_and_many_overflows_in_a_row_end_the_run() -> None:
    scaler = LossScaler(LossScaling(fixed=128.0), CPU)
    for number in range(3 * MAX_CONSECUTIVE_OVERFLOWS):
        scaler.update(torch.tensor(math.inf if number % MAX_CONSECUTIVE_OVERFLOWS else 1.0))
        scaler.raise_if_stuck(1)
    assert scaler.log_values() == {"loss_scale": 128.0, "skipped_steps": 3 * (MAX_CONSECUTIVE_OVERFLOWS - 1)}
    scaler.update(torch.tensor(math.inf))
    with pytest.raises(UserError, match=rf"in {MAX_CONSECUTIVE_OVERFLOWS} steps in a row at the fixed loss scale 128"):
        scaler.raise_if_stuck(1)


# ------------------------------------------------------------------------------------------------------- runs


def run(store: Path, out: Path, **changes: Any) -> dict[int, dict[str, Any]]:
    """The logged steps of a run of 6 steps."""
    settings = toy.parameters(store, **{"max_steps": 6, "precision": "fp16", **changes})
    train_in_this_process(Parameters.from_dict(settings, source="test"), out)
    return toy.records(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "objective"),
    [(None, {"type": "masked_lm"}), (GPT2, {"type": "causal_lm"}), (T5, SPANS)],
    ids=["bert", "gpt2", "t5"],
)
def test_losses_are_those_of_fp32(
    architecture: dict[str, Any] | None, objective: dict[str, Any], store: Path, tmp_path: Path
) -> None:
    chosen: dict[str, Any] = {} if architecture is None else {"architecture": architecture}
    chosen["objective"] = objective
    full = run(store, tmp_path / "full", precision="fp32", **chosen)
    half = run(store, tmp_path / "half", **chosen)
    assert [each["skipped_steps"] for each in half.values()] == [0] * 6
    assert {each["loss_scale"] for each in half.values()} == {65536.0}
    for step, record in full.items():
        assert half[step]["loss"] == pytest.approx(record["loss"], rel=1e-2)
        assert half[step]["grad_norm"] == pytest.approx(record["grad_norm"], rel=5e-2)
    assert any(half[step]["loss"] != record["loss"] for step, record in full.items()), "the run computed in fp32"


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, precision="fp16", max_steps=2, loss_scaling={"init_scale": HUGE})
    parameters = Parameters.from_dict(settings, source="test")
    train_in_this_process(parameters, tmp_path)
    records = toy.records(tmp_path)
    assert [(each["loss_scale"], each["skipped_steps"]) for each in records.values()] == [(HUGE / 2, 1), (HUGE / 4, 2)]
    assert all(each["grad_norm"] is None for each in records.values())
    saved = tmp_path / "checkpoints/step-00000002"
    drawn = dict(build_module(parameters, TokenStore.open(store).facts.vocabulary).named_parameters())
    state = load_file(saved / "state/model-00000.safetensors")
    assert all(torch.equal(state[name], value) for name, value in drawn.items())
    assert not load_file(saved / "state/optimizer-00000.safetensors")
    assert json.loads((saved / "manifest.json").read_text())["loss_scaling"]["scale"] == HUGE / 4


def test_a_run_that_ends_at_the_lowest_scale_says_so(store: Path, tmp_path: Path) -> None:
    settings = {"init_scale": HUGE, "min_scale": HUGE}
    with pytest.raises(UserError, match=r'the lowest allowed.*lower optimizer.learning_rate, or train in "bf16"'):
        run(store, tmp_path, loss_scaling=settings)
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical_on_two_processes(store: Path, tmp_path: Path) -> None:
    """The scale falls and rises before and after the kill; one process has the same scale as two."""
    scaling = {"init_scale": 2.0**27, "growth_interval": 2}
    settings = toy.parameters(
        store, precision="fp16", loss_scaling=scaling, batch_size={"0": 9, "1": 7}, activation_checkpointing="selective"
    )
    said, _ = kill_and_resume(settings, tmp_path, nodes=(1, 1))
    assert "skipped, as gradients overflowed fp16; loss scale 67,108,864" in said
    cut, straight = (
        [(each["loss_scale"], each["skipped_steps"]) for each in toy.records(tmp_path / name).values()]
        for name in ("cut", "straight")
    )
    assert cut == straight and len(straight) == 12
    scales = [scale for scale, _ in straight]
    assert any(after > before for before, after in pairwise(scales)), "it rises too"
    assert 1 < straight[-1][1] < 12
    alone = run(store, tmp_path / "alone", max_steps=12, loss_scaling=scaling)
    assert [each["loss_scale"] for each in alone.values()] == scales

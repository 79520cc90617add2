"""Three and four processes, in which kinds of parallelism work together and replicas have unequal rows, train what one
process trains, resume bit for bit, and read each other's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_work
import pytest
import toy
from engine_runs import (
    FOUR,
    THREE,
    Case,
    Runs,
    adapted,
    assert_exported_alike,
    assert_goes_on,
    assert_resumed_alike,
    assert_trained_alike,
    checkpoint,
)
from killed_runs import kill_and_resume
from safetensors.torch import load_file
from selection import at_night
from test_two_processes import BUBBLE, DEEP, EMA, FSDP, FULL, HALF, POSITIONS, PP, SELECTIVE, SP, TP, assert_parts_alike
from test_two_processes import CASES as PAIRS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HYBRID = {**FSDP, "dp_shard_size": 2}


def four(family: str, *ways: dict[str, Any], both: dict[str, Any] | None = None, **own: Any) -> Case:
    return Case(family, {key: value for way in ways for key, value in way.items()}, both or {}, own, FOUR)


CASES: dict[str, Case] = {
    "fsdp, three": Case("odd", FSDP, nodes=THREE),
    **{f"tp {name}": four(name, TP) for name in ("gpt2", "llama", "bert", "electra", "gptj", "qwen3", "roberta")},
    "tp 4": four("gpt2", {"tp_size": 4}),
    "tp, frozen": Case("llama", TP, {"frozen_layers": 1}, nodes=FOUR, started=True),
    "pp gpt2": four("gpt2", PP, both=DEEP),
    "pp llama": four("llama", PP, both=DEEP),
    **{f"pp 4 {name}": four(name, {"pp_size": 4}, both=DEEP) for name in ("gpt2", "gptj", "llama", "qwen3")},
    "hybrid": four("odd", HYBRID),
    "hybrid, bf16": Case("odd", HYBRID, HALF, nodes=FOUR, exact=2e-3, close=1e-2),
    "hybrid, adafactor": four("bert", HYBRID, both={"optimizer": {"type": "adafactor", "learning_rate": 0.3}}),
    "sp, fsdp": four("llama", SP, FSDP, **FULL),
    "tp, fsdp": four("qwen3", TP, FSDP, **SELECTIVE),
    "tp, fsdp, fused": four("gpt2", TP, FSDP),
    "tp positions, fsdp": four("qwen3", POSITIONS, FSDP),
    "tp positions, pp": four("gpt2", POSITIONS, PP, **SELECTIVE),
    "tp, pp": four("gpt2", TP, PP, **FULL),
    "pp, fsdp": four("gpt2", PP, FSDP, **FULL),
    "bubble, fsdp": four("gpt2", BUBBLE, FSDP),
    "sp, tp": four("qwen3", SP, TP),
    "sp, pp": four("gpt2", SP, PP),
    "lora, tp, fsdp": adapted("gpt2", {**TP, **FSDP}, FOUR),
    "lora, tp, pp": adapted("llama", {**TP, **PP}, FOUR),
    **{f"ema, {name}": four("llama", way, both=EMA) for name, way in (("hybrid", HYBRID), ("tp", TP), ("pp", PP))},
}
ALWAYS = ("fsdp, three", "tp, fsdp, fused")
RESUMED = ("fsdp, three",)
GO_ON: dict[str, tuple[Case, Case | None]] = {
    "sp, fsdp from one": (CASES["sp, fsdp"], None),
    "pp, fsdp from tp, pp": (CASES["pp, fsdp"], CASES["tp, pp"]),
    "tp, fsdp from pp, fsdp": (CASES["tp, fsdp, fused"], CASES["pp, fsdp"]),
    "tp, pp from tp positions, pp": (CASES["tp, pp"], CASES["tp positions, pp"]),
    "tp positions, fsdp from sp, tp": (CASES["tp positions, fsdp"], CASES["sp, tp"]),
    "three from two": (CASES["fsdp, three"], PAIRS["fsdp odd"]),
    "one from three": (Case("odd", FSDP, nodes=(1,)), CASES["fsdp, three"]),
    "hybrid from one": (CASES["hybrid"], None),
    "one from hybrid": (Case("odd", {}, nodes=(1,)), CASES["hybrid"]),
    "fsdp from hybrid": (four("odd", FSDP), CASES["hybrid"]),
    "ddp from hybrid": (four("odd", {"engine": "ddp"}), CASES["hybrid"]),
}


@pytest.mark.parametrize("name", at_night(CASES, always=ALWAYS))
def test_several_processes_train_what_one_trains(runs: Runs, name: str) -> None:
    assert_trained_alike(runs, CASES[name])


@pytest.mark.parametrize("name", at_night(CASES, always=RESUMED))
def test_resumed_is_bit_identical(runs: Runs, name: str) -> None:
    assert_resumed_alike(runs, CASES[name])


@pytest.mark.parametrize("name", at_night(GO_ON, always=("one from three",)))
def test_a_run_goes_on_under_another_layout(runs: Runs, name: str) -> None:
    assert_goes_on(runs, *GO_ON[name])


@pytest.mark.parametrize("name", at_night(CASES, always=("tp, fsdp, fused",)))
def test_the_export_is_that_of_one_process(runs: Runs, name: str, tmp_path: Path) -> None:
    assert_exported_alike(runs, CASES[name], tmp_path)


DIVIDED = [name for name in CASES if name.startswith("tp ") and "positions" not in name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_weights_stay_equal_across_replicas(runs: Runs, name: str) -> None:
    assert_parts_alike(runs.of(CASES[name], work=engine_work.alike), 4 if name == "tp 4" else 2)


@pytest.mark.nightly
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(runs: Runs) -> None:
    out = runs.of(CASES["tp llama"], checkpoint(runs.of(CASES["tp llama"]), 1), engine_work.poison)
    assert json.loads((out / "poison.json").read_text()) == [[[False, True], [False, True], [True, False]]] * 4


@pytest.mark.nightly
def test_each_process_of_a_group_holds_half_of_every_weight(runs: Runs) -> None:
    out = runs.of(CASES["hybrid"], work=engine_work.gradients)
    whole = sum(value.numel() for value in load_file(out / "gradients.safetensors").values())
    held = [numbers for numbers, _ in json.loads((out / "held.json").read_text())["held"]]
    assert held[:2] == held[2:] and sum(held) == 2 * whole and max(held) < 1.1 * whole / 2


KILLED: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any], tuple[str, ...]]] = {
    "fsdp": (FSDP, (1, 1), {"batch_size": {"0": 9, "1": 7}}, ("2 processes on 2 nodes", "on cpu, fsdp, fp32")),
    "tp": (POSITIONS, (2,), {}, ("ddp, tp_size 2, sequence_parallel, fp32",)),
    "pp": (PP, (2,), {}, ("ddp, pp_size 2, fp32",)),
    "sp": (SP, (2,), {}, ("ddp, sp_size 2, fp32",)),
    "hybrid": (
        HYBRID, (2, 2), {"batch_size": {"0": 9, "1": 7}, "precision": "bf16"},
        ("4 processes on 2 nodes", "on cpu, fsdp, dp_shard_size 2, bf16"),
    ),
}  # fmt: skip
LLAMA = {
    "type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32, "attention_dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", at_night(KILLED, always=("fsdp",)))
def test_killed_and_resumed_on_the_command_line(name: str, store: Path, validation_store: Path, tmp_path: Path) -> None:
    """With dropout, and a checkpoint within an interval of logging; `--set` selects the engine."""
    parallel, nodes, changes, words = KILLED[name]
    settings = toy.parameters(store, validation_store, logging_steps=3, **changes)
    if name == "pp":
        settings |= {"architecture": LLAMA, "objective": {"type": "causal_lm"}}
    asked = [word for key, value in parallel.items() for word in ("--set", f"parallel.{key}={json.dumps(value)}")]
    said, _ = kill_and_resume(settings, tmp_path, *asked, nodes=nodes)
    assert all(each in said for each in words) and "Warning" not in said


def test_a_number_of_processes_that_is_no_multiple_is_refused(store: Path, tmp_path: Path) -> None:
    said = toy.train(toy.parameters(store, parallel=SP), tmp_path / "run", nodes=(3,), code=2)
    assert "2 processes work on the same rows, but the run has 3 processes" in said

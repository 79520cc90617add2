"""Hybrid sharding: two nodes of two processes, which share weights within a node, train what one process trains.

The first node has 5 rows of each step and the second 2, in micro-steps of 2, so that some processes run empty ones.
`test_fsdp_groups.py` has what needs no processes.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_worker
import pytest
import toy
import worlds
from engine_runs import (
    LAST,
    MIDDLE,
    UNVALIDATED,
    assert_close,
    assert_same_losses,
    checkpoint,
    here,
    settings,
    state,
)
from killed_runs import kill_and_resume
from safetensors.torch import load_file

pytestmark = pytest.mark.nightly
HYBRID = {"parallel": {"engine": "fsdp", "dp_shard_size": 2}}
AS_HYBRID = ("--set", "parallel.engine=fsdp", "--set", "parallel.dp_shard_size=2")
NODES = {"0": 5, "1": 2}
ELSEWHERE = {"fsdp": {"parallel": {"engine": "fsdp"}}, "ddp": {"parallel": {"engine": "ddp"}}}


@pytest.fixture(scope="module")
def runs(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    base = tmp_path_factory.mktemp("hybrid")

    def job(name: str, source: str | None = None, **changes: Any) -> dict[str, Any]:
        begin = {"start_from": str(checkpoint(base / source, MIDDLE))} if source else {}
        raw = settings(store, validation_store, None, NODES, **{**HYBRID, **changes})
        return {"out": str(base / name), "settings": raw, **begin}

    here(base / "plain", settings(store, validation_store, None, {"-1": 7}))
    half = {"precision": "bf16", "autocast": True, **UNVALIDATED}
    here(base / "bf16_plain", settings(store, validation_store, None, {"-1": 7}, **half))
    jobs = [
        {**job("gradients"), "gradients": True},
        job("hybrid"),
        job("resumed", "hybrid"),
        job("from_plain", "plain", **UNVALIDATED),
        job("bf16", **half),
        job("bf16_resumed", "bf16", **half),
        *(job(f"to_{name}", "hybrid", **UNVALIDATED, **parallel) for name, parallel in ELSEWHERE.items()),
    ]
    toy.finish(worlds.start(partial(fsdp_worker.run, jobs), (2, 2), base / "said"))
    one = settings(store, validation_store, None, {"-1": 7}, **UNVALIDATED)
    here(base / "to_one", one, checkpoint(base / "hybrid", MIDDLE))
    return base


def test_four_processes_train_what_one_trains(runs: Path) -> None:
    assert_same_losses(runs / "plain", runs / "hybrid", 1e-6)
    for step in (MIDDLE, LAST):
        assert_close(state(runs / "plain", "model", step), state(runs / "hybrid", "model", step), 1e-6)
    assert_close(state(runs / "plain", "optimizer"), state(runs / "hybrid", "optimizer"), 1e-5)
    plain, mine = (toy.records(runs / each, "validation") for each in ("plain", "hybrid"))
    assert plain.keys() == mine.keys()
    for step in plain:
        assert mine[step]["loss"] == pytest.approx(plain[step]["loss"], rel=1e-5)


def test_each_process_holds_half_of_every_weight(runs: Path) -> None:
    whole = sum(value.numel() for value in load_file(runs / "gradients/gradients.safetensors").values())
    held = [numbers for numbers, _ in json.loads((runs / "gradients/held.json").read_text())["held"]]
    assert held[:2] == held[2:] and sum(held) == 2 * whole and max(held) < 1.1 * whole / 2


@pytest.mark.parametrize("name", ["hybrid", "bf16"])
def test_resumed_is_bit_identical(runs: Path, name: str) -> None:
    resumed = runs / {"hybrid": "resumed", "bf16": "bf16_resumed"}[name]
    assert set(toy.losses(resumed)) == set(range(MIDDLE + 1, LAST + 1))
    assert_same_losses(runs / name, resumed, 0.0)
    for kind in ("model", "optimizer"):
        assert_close(state(runs / name, kind), state(resumed, kind), 0.0)


@pytest.mark.parametrize("name", ["from_plain", "to_fsdp", "to_ddp", "to_one"])
def test_other_engines_go_on_and_back(runs: Path, name: str) -> None:
    assert set(toy.losses(runs / name)) == set(range(MIDDLE + 1, LAST + 1))
    assert_same_losses(runs / "plain", runs / name, 1e-5)
    assert_close(state(runs / "plain", "model"), state(runs / name, "model"), 1e-5)


def test_bf16_trains_as_one_process_does(runs: Path) -> None:
    assert_same_losses(runs / "bf16_plain", runs / "bf16", 2e-3)
    assert_close(state(runs / "bf16_plain", "model"), state(runs / "bf16", "model"), 1e-2)


def test_killed_and_resumed_is_bit_identical(store: Path, validation_store: Path, tmp_path: Path) -> None:
    """With dropout, in bf16."""
    raw = toy.parameters(store, validation_store, batch_size={"0": 9, "1": 7}, logging_steps=3, precision="bf16")
    said, _ = kill_and_resume(raw, tmp_path, *AS_HYBRID, nodes=(2, 2))
    assert "4 processes on 2 nodes" in said and "on cpu, fsdp, dp_shard_size 2, bf16" in said

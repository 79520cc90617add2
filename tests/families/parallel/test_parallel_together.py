"""Kinds of parallelism together train what one process trains, and any of them reads the checkpoints of another.

A world of four processes on two nodes, with 5 rows and with 2 in micro-steps of 2, runs every job.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tensor_worker
import torch
import toy
import worlds
from engine_runs import UNVALIDATED, assert_close, assert_same_losses, here
from safetensors.torch import load_file
from selection import at_night, wanted
from test_tensor_parallel import NODES, settings

from terakoya.conversion.export import export

pytestmark = pytest.mark.slow

LAST, MIDDLE = 2, 1
CLOSE = 1e-5
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sp_fsdp": ("llama", {"sp_size": 2, "engine": "fsdp"}, {"activation_checkpointing": "full"}),
    "tp_fsdp": ("qwen3", {"tp_size": 2, "engine": "fsdp"}, {"activation_checkpointing": "selective"}),
    "tp_fsdp_fused": ("gpt2", {"tp_size": 2, "engine": "fsdp"}, {}),
    "tp_positions_fsdp": ("qwen3", {"tp_size": 2, "sequence_parallel": True, "engine": "fsdp"}, {}),
    "tp_positions_pp": (
        "gpt2", {"tp_size": 2, "sequence_parallel": True, "pp_size": 2}, {"activation_checkpointing": "selective"}
    ),
    "tp_pp": ("gpt2", {"tp_size": 2, "pp_size": 2}, {"activation_checkpointing": "full"}),
    "pp_fsdp": ("gpt2", {"pp_size": 2, "engine": "fsdp"}, {"activation_checkpointing": "full"}),
    "zero_bubble_fsdp": ("gpt2", {"pp_size": 2, "pp_schedule": "zero_bubble", "engine": "fsdp"}, {}),
    "sp_tp": ("qwen3", {"sp_size": 2, "tp_size": 2}, {}),
    "sp_pp": ("gpt2", {"sp_size": 2, "pp_size": 2}, {}),
}  # fmt: skip
"""An architecture, how processes work together, and other settings."""
EACH = at_night(CASES, always=("sp_fsdp", "tp_fsdp_fused", "tp_positions_pp", "zero_bubble_fsdp", "sp_tp"))
ANOTHER = {
    "sp_fsdp": "plain_llama", "pp_fsdp": "tp_pp", "tp_fsdp_fused": "pp_fsdp", "tp_pp": "tp_positions_pp",
    "tp_positions_fsdp": "sp_tp",
}  # fmt: skip
"""Case -> the run that it goes on from."""


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of all runs."""
    others = wanted(request, "other")
    needed = {*wanted(request, "case"), *others, *(ANOTHER[case] for case in others)}
    cases = [case for case in CASES if case in needed]
    base = tmp_path_factory.mktemp("together")
    jobs: list[dict[str, Any]] = []

    def add(out: str, case: str, source: str | None = None, **changes: Any) -> None:
        family, parallel, others = CASES[case]
        raw = settings(store, validation_store, family, parallel=parallel, **NODES, **others, **changes)
        begin = source and str(base / source / f"checkpoints/step-{MIDDLE:08d}")
        jobs.append({"out": str(base / out), "settings": raw, "start_from": begin})

    for family in sorted({CASES[case][0] for case in cases}):
        here(base / f"plain_{family}", settings(store, validation_store, family))
    for case in cases:
        add(case, case)
        add(f"{case}.resumed", case, case, **UNVALIDATED)
    for case in others:
        add(f"{case}.from_another", case, ANOTHER[case], **UNVALIDATED)
    toy.finish(worlds.start(partial(tensor_worker.work, jobs), (2, 2), base / "said"))
    return base


def state(out: Path, kind: str, step: int = LAST) -> dict[str, torch.Tensor]:
    return toy.saved(out / f"checkpoints/step-{step:08d}", kind)


def moments(out: Path, step: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state(out, "optimizer", step).items() if name.endswith("/exp_avg")}


@pytest.mark.parametrize("case", EACH)
def test_four_processes_train_what_one_trains(runs: Path, case: str) -> None:
    plain = runs / f"plain_{CASES[case][0]}"
    assert_close(moments(plain, MIDDLE), moments(runs / case, MIDDLE), CLOSE)  # a step's gradients, times a constant
    assert_close(state(plain, "model"), state(runs / case, "model"), CLOSE)
    assert_same_losses(plain, runs / case, 1e-6)
    for step, record in toy.records(plain, "step").items():
        assert toy.records(runs / case, "step")[step]["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-5)
    for step, record in toy.records(plain, "validation").items():
        assert toy.records(runs / case, "validation")[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)


@pytest.mark.parametrize("case", EACH)
def test_resumed_is_bit_identical(runs: Path, case: str) -> None:
    resumed = runs / f"{case}.resumed"
    assert set(toy.losses(resumed)) == {LAST}
    assert_same_losses(runs / case, resumed, 0.0)
    for kind in ("model", "optimizer"):
        assert_close(state(runs / case, kind), state(resumed, kind), 0.0)


@pytest.mark.parametrize("other", at_night(ANOTHER, always=("sp_fsdp", "tp_positions_fsdp")))
def test_a_run_goes_on_under_another_layout(runs: Path, other: str) -> None:
    plain, mine = runs / f"plain_{CASES[other][0]}", runs / f"{other}.from_another"
    assert set(toy.losses(mine)) == {LAST}
    assert_close(state(plain, "model"), state(mine, "model"), CLOSE)


@pytest.mark.parametrize("case", EACH)
def test_the_export_is_that_of_one_process(runs: Path, case: str, tmp_path: Path) -> None:
    exported = []
    for name in (case, f"plain_{CASES[case][0]}"):
        export(runs / name, tmp_path / name)
        exported.append(load_file(tmp_path / name / "model.safetensors"))
    assert_close(*exported, CLOSE)

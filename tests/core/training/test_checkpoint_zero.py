"""Checkpoints of ZeRO: each process writes its own shards, and every other stage, or none, continues from them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from engine_runs import assert_close, checkpoint, here, settings, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

LAST = 6
ONE, TWO = {"-1": 7}, {"0": 5, "1": 2}
LEGS = ((3, 2), (None, 4), (1, LAST))
"""Stage, where None is ddp, and the last step that it trains."""


@pytest.fixture(scope="module")
def runs(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process from beginning to end, and two that change stages on the way, with saves in the background."""
    base = tmp_path_factory.mktemp("zero")
    common: dict[str, Any] = {"evaluation": None, "schedule": {"type": "constant"}}
    here(base / "straight", settings(store, validation_store, None, ONE, max_steps=LAST, **common))
    jobs = []
    before = None
    for number, (stage, last) in enumerate(LEGS):
        saving = {"save_steps": 2, "async_save": True}
        changes = settings(store, validation_store, stage, TWO, max_steps=last, checkpoint=saving, **common)
        out = base / f"leg{number}"
        jobs.append({"out": str(out), "settings": changes, "start_from": before, "watch": stage is not None})
        before = str(checkpoint(out, last))
    processes = start(jobs, base / "pair", 2)
    toy.finish(processes)
    return base


@pytest.mark.slow
def test_from_stage_three_to_ddp_to_stage_one(runs: Path) -> None:
    straight = toy.losses(runs / "straight")
    moved = {step: values for number in range(len(LEGS)) for step, values in toy.losses(runs / f"leg{number}").items()}
    assert sorted(moved) == sorted(straight) == list(range(1, LAST + 1))
    assert all(abs(moved[step][0] - straight[step][0]) < 1e-5 for step in straight)
    mine, theirs = checkpoint(runs / "leg2", LAST), checkpoint(runs / "straight", LAST)
    for kind in ("model", "optimizer"):
        assert_close(toy.saved(theirs, kind), toy.saved(mine, kind), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])
def test_saving_gathers_no_weights(runs: Path, number: int) -> None:
    """Of sharded weights no process writes, or sees, more than its half."""
    last = LEGS[number][1]
    whole = {name: value.numel() for name, value in toy.saved(checkpoint(runs / f"leg{number}", last)).items()}
    watched = json.loads((runs / f"leg{number}/watched.json").read_text())
    assert [each["gathered"] for each in watched] == [0, 0]
    total = sum(whole.values())
    written = [sum(each["sizes"].values()) for each in watched]
    assert sum(written) == total and max(written) < 0.51 * total
    largest = max(whole, key=lambda name: whole[name])
    if number == 0:  # stage 3 splits every weight in two, stage 1 the concatenation of all
        assert all(each["sizes"][largest] <= -(-whole[largest] // 2) for each in watched)


@pytest.mark.slow
def test_files_hold_only_the_ranges_of_their_process(runs: Path) -> None:
    folder = checkpoint(runs / "leg0", 2) / "state"
    sizes = [path.stat().st_size for path in sorted(folder.glob("optimizer-*"))]
    elements = sum(value.numel() for value in toy.saved(folder.parent, "optimizer").values())
    assert len(sizes) == 2 and abs(sizes[0] - sizes[1]) < 0.1 * sizes[0]
    assert 4 * elements < sum(sizes) < 4 * elements + 200 * len(toy.saved(folder.parent, "optimizer")) * 2
    assert {value.dtype for value in toy.saved(folder.parent).values()} == {torch.float32}

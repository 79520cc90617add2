"""`fully_shard` from the command line: killed, resumed, and continued by ZeRO and the other way round."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_worker
import pytest
import toy
import worlds
from engine_runs import LAST, MIDDLE, assert_close, assert_same_losses, checkpoint, here, settings, start, state
from killed_runs import kill_and_resume

AS_FSDP = ("--set", "parallel.engine=fsdp")


@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(store: Path, validation_store: Path, tmp_path: Path) -> None:
    """With dropout; the checkpoint is saved within an interval of logging."""
    raw = toy.parameters(store, validation_store, batch_size={"0": 9, "1": 7}, logging_steps=3)
    said, _ = kill_and_resume(raw, tmp_path, *AS_FSDP, nodes=(1, 1))
    assert "2 processes on 2 nodes" in said and "on cpu, fsdp, fp32" in said and "Warning" not in said


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_zero_and_fsdp_resume_each_others_runs(store: Path, validation_store: Path, tmp_path: Path) -> None:
    rows = {"0": 5, "1": 2}
    zero = settings(store, validation_store, 2, rows)
    fsdp = {**settings(store, validation_store, None, rows), "parallel": {"engine": "fsdp"}}

    def job(name: str, raw: dict[str, Any], source: str | None = None) -> dict[str, Any]:
        begin = source and str(checkpoint(tmp_path / source, MIDDLE))
        return {"out": str(tmp_path / name), "settings": raw, "start_from": begin}

    here(tmp_path / "plain", settings(store, validation_store, None, {"-1": 7}))
    toy.finish(worlds.start(partial(fsdp_worker.run, [job("fsdp", fsdp)]), (1, 1), tmp_path / "said"))
    started = start([job("zero", zero), job("from_fsdp", zero, "fsdp")], tmp_path / "jobs", 2)
    toy.finish(started)
    back = partial(fsdp_worker.run, [job("from_zero", fsdp, "zero")])
    toy.finish(worlds.start(back, (1, 1), tmp_path / "said"))
    for name in ("from_zero", "from_fsdp"):
        assert set(toy.losses(tmp_path / name)) == set(range(MIDDLE + 1, LAST + 1))
        assert_same_losses(tmp_path / "plain", tmp_path / name, 1e-5)
        assert_close(state(tmp_path / "plain", "model"), state(tmp_path / name, "model"), 1e-5)

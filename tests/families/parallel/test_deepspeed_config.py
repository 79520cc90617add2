"""Offloading and a user's own DeepSpeed JSON change where numbers are stored, and none of the numbers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import toy
from engine_runs import LAST, MIDDLE, assert_close, assert_same_losses, checkpoint, here, settings, start, state

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

CONFIG = {
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50, "overlap_comm": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "optimizer1": {"zero_stage": 1, "offload_optimizer_device": "cpu"},
    "optimizer2": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    "both3": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    "buckets2": {"zero_stage": 2, "deepspeed_config": CONFIG},
}


@pytest.fixture(scope="module")
def runs(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: `plain`, and for each configuration an uninterrupted and a resumed run."""
    base = tmp_path_factory.mktemp("deepspeed_config")
    here(base / "plain", settings(store, validation_store, None, {"-1": 7}))
    jobs = []
    for name, parallel in WAYS.items():
        rows = {"0": 5, "1": 2}
        raw = settings(store, validation_store, 0, rows, parallel={"engine": "deepspeed", **parallel})
        jobs.append({"out": str(base / name), "settings": raw})
        middle = str(checkpoint(base / name, MIDDLE))
        jobs.append({"out": str(base / f"resumed_{name}"), "settings": raw, "start_from": middle})
    started = start(jobs, base / "pair", 2)
    toy.finish(started)
    return base


@pytest.mark.slow
def test_deepspeed_received_the_settings(runs: Path) -> None:
    told = {name: json.loads((runs / name / "zero.json").read_text()) for name in WAYS}
    for name, sections in (("optimizer1", 1), ("optimizer2", 1), ("both3", 2), ("buckets2", 0)):
        offloads = [told[name][key] for key in ("offload_optimizer", "offload_param")]
        assert [each["device"] for each in offloads if each] == ["cpu"] * sections
    assert (told["buckets2"]["reduce_bucket_size"], told["buckets2"]["overlap_comm"]) == (50, True)
    assert told["optimizer2"]["reduce_bucket_size"] != 50


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_it_trains_what_one_process_trains(runs: Path, name: str) -> None:
    assert_same_losses(runs / "plain", runs / name, 1e-6)
    assert_close(state(runs / "plain", "model", LAST), state(runs / name, "model", LAST), 1e-6)
    assert_close(state(runs / "plain", "optimizer"), state(runs / name, "optimizer"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_it_resumes_bit_identically(runs: Path, name: str) -> None:
    assert_same_losses(runs / name, runs / f"resumed_{name}", 0.0)
    for kind in ("model", "optimizer"):
        assert_close(state(runs / name, kind), state(runs / f"resumed_{name}", kind), 0.0)

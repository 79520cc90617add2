"""Frozen weights under DeepSpeed's stages: they keep their bits, the rest is trained as by one process."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import toy
from engine_runs import LAST, MIDDLE, STAGES, assert_close, checkpoint, here, settings, start, state
from frozen_weights import is_low
from safetensors.torch import load_file
from start_folders import spread
from transformers import BertConfig, BertForMaskedLM

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def runs(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: `plain`, `stage0`, `resumed0`, ... and of the model `start` from which they start."""
    base = tmp_path_factory.mktemp("deepspeed_frozen")

    def run(stage: int | None, rows: dict[str, int]) -> dict[str, Any]:
        raw = settings(store, validation_store, stage, rows, start_from=str(base / "start"), frozen_layers=1)
        raw["architecture"]["num_hidden_layers"] = 2
        return raw

    two = {"0": 5, "1": 2}
    shape = {key: value for key, value in run(None, two)["architecture"].items() if key != "type"}
    spread(BertForMaskedLM(BertConfig(**shape, vocab_size=200, pad_token_id=0)), 1).save_pretrained(base / "start")
    here(base / "plain", run(None, {"-1": 7}))
    jobs = []
    for stage in STAGES:
        jobs.append({"out": str(base / f"stage{stage}"), "settings": run(stage, two)})
        middle = str(checkpoint(base / f"stage{stage}", MIDDLE))
        jobs.append({"out": str(base / f"resumed{stage}"), "settings": run(stage, two), "start_from": middle})
    started = start(jobs, base / "pair", 2)
    toy.finish(started, seconds=240)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_starts_and_freezes_as_one_process_does(runs: Path, stage: int) -> None:
    plain, mine = runs / "plain", runs / f"stage{stage}"
    for step, values in toy.records(plain).items():
        assert toy.records(mine)[step]["loss"] == pytest.approx(values["loss"], rel=1e-5), step
    assert_close(state(plain, "model"), state(mine, "model"), 1e-5)
    before, after = load_file(runs / "start/model.safetensors"), state(mine, "model")
    for name, value in before.items():
        same = value.numpy().tobytes() == after[f"model.{name}"].numpy().tobytes()
        idle = name.endswith("key.bias")  # its gradient is 0: it does not change the softmax
        assert same == is_low(name) or idle, name
    assert not any(is_low(name) for name in state(mine, "optimizer"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_resumes_exactly(runs: Path, stage: int) -> None:
    straight, resumed = runs / f"stage{stage}", runs / f"resumed{stage}"
    assert toy.losses(resumed)[LAST] == toy.losses(straight)[LAST]
    for kind in ("model", "optimizer"):
        assert_close(state(straight, kind), state(resumed, kind), 0.0)

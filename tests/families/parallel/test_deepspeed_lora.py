"""Adapters under DeepSpeed's stages: trained as by one process, with frozen weights unchanged, and only adapters
saved."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import toy
from engine_runs import LAST, MIDDLE, assert_close, checkpoint, here, settings, start, state
from safetensors.torch import load_file
from start_folders import spread
from transformers import BertConfig, BertForMaskedLM

from terakoya.conversion.export import export

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]
STAGES = [2, 3]


@pytest.fixture(scope="module")
def runs(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: `plain`, `stage2`, `stage3`, `resumed3`, and of the model `start` below adapters."""
    base = tmp_path_factory.mktemp("deepspeed_lora")

    def run(stage: int | None, rows: dict[str, int]) -> dict[str, Any]:
        lora = {"r": 2, "target_modules": "all-linear"}
        return settings(store, validation_store, stage, rows, start_from=str(base / "start"), lora=lora)

    two = {"0": 5, "1": 2}
    shape = {key: value for key, value in run(None, two)["architecture"].items() if key != "type"}
    spread(BertForMaskedLM(BertConfig(**shape, vocab_size=200, pad_token_id=0)), 1).save_pretrained(base / "start")
    here(base / "plain", run(None, {"-1": 7}))
    jobs = [{"out": str(base / f"stage{stage}"), "settings": run(stage, two)} for stage in STAGES]
    middle = str(checkpoint(base / "stage3", MIDDLE))
    jobs.append({"out": str(base / "resumed3"), "settings": run(3, two), "start_from": middle})
    started = start(jobs, base / "pair", 2)
    toy.finish(started)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_adapters_as_one_process_does(runs: Path, stage: int, tmp_path: Path) -> None:
    plain, mine = runs / "plain", runs / f"stage{stage}"
    for step, values in toy.records(plain).items():
        assert toy.records(mine)[step]["loss"] == pytest.approx(values["loss"], rel=1e-5), step
    adapters = state(mine, "model")
    assert adapters and all(".lora_" in name for name in adapters)
    assert {name.rpartition("/")[0] for name in state(mine, "optimizer")} == adapters.keys()
    assert_close(state(plain, "model"), adapters, 1e-5)
    done = export(checkpoint(mine, LAST), tmp_path / "out")
    for folder in (done.out, checkpoint(mine, LAST) / "model"):
        merged = load_file(folder / "model.safetensors")
        assert_close(load_file(checkpoint(plain, LAST) / "model/model.safetensors"), merged, 1e-5)
    assert (checkpoint(mine, LAST) / "adapter/adapter_config.json").is_file()


@pytest.mark.slow
def test_stage_3_resumes_exactly(runs: Path) -> None:
    straight, resumed = runs / "stage3", runs / "resumed3"
    assert toy.losses(resumed)[LAST] == toy.losses(straight)[LAST]
    for kind in ("model", "optimizer"):
        assert_close(state(straight, kind), state(resumed, kind), 0.0)

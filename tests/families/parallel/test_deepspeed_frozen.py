"""Frozen weights under DeepSpeed's stages: they keep their bits, the rest is trained as by one process."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from engine_runs import LAST, MIDDLE, STAGES, assert_close, checkpoint, here, settings, start, state
from frozen_weights import is_low
from safetensors.torch import load_file
from selection import at_night, wanted
from start_folders import spread
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from terakoya.errors import UserError
from terakoya_parallel.deepspeed import DeepSpeedEngine, Fragment
from terakoya_parallel.whole_tensors import WholeTensors

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
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
    for stage in wanted(request, "stage"):
        jobs.append({"out": str(base / f"stage{stage}"), "settings": run(stage, two)})
        middle = str(checkpoint(base / f"stage{stage}", MIDDLE))
        jobs.append({"out": str(base / f"resumed{stage}"), "settings": run(stage, two), "start_from": middle})
    started = start(jobs, base / "pair", 2)
    toy.finish(started)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night(STAGES, always=(3,)))
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
@pytest.mark.parametrize("stage", at_night(STAGES, always=(3,)))
def test_a_stage_resumes_exactly(runs: Path, stage: int) -> None:
    straight, resumed = runs / f"stage{stage}", runs / f"resumed{stage}"
    assert toy.losses(resumed)[LAST] == toy.losses(straight)[LAST]
    for kind in ("model", "optimizer"):
        assert_close(state(straight, kind), state(resumed, kind), 0.0)


class Saved(dict[str, Tensor]):
    """The tensors of a checkpoint."""

    __call__ = dict.__getitem__

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def part(self, name: str, start: int, size: int) -> Tensor:
        return self[name][start : start + size]


def test_weights_that_were_frozen_do_not_get_the_step_count_of_others() -> None:
    """Their moments of 0 would be those of many steps. A count that stays, without bias correction, is no such one."""
    flat, saved = nn.Parameter(torch.zeros(4)), Saved({"high/exp_avg": torch.ones(2), "high/step": torch.tensor(7.0)})
    engine: Any = object.__new__(DeepSpeedEngine)
    engine.optimizer, engine.fused = torch.optim.AdamW([flat]), False
    engine.whole = WholeTensors(engine.optimizer, {}, None, device=flat.device)
    engine.trainable = {name: nn.Parameter(torch.zeros(2)) for name in ("low", "high")}
    engine.fragments = {"low": Fragment(flat, 0, 0, 2), "high": Fragment(flat, 2, 0, 2)}
    with pytest.raises(UserError, match=r'low: its optimizer state step is 0 but others have 7; .* engine "ddp"'):
        engine.load_optimizer_state(saved, frozenset(saved))
    saved["high/step"] = torch.tensor(1e8)
    engine.load_optimizer_state(saved, frozenset(saved))
    assert engine.optimizer.state[flat]["exp_avg"].tolist() == [0.0, 0.0, 1.0, 1.0]

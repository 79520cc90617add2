"""Estimates of memory and disk, against what real steps allocate and real checkpoints take."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_worker import most_at_once
from selection import at_night

import terakoya
from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.rows.stores import Stores
from terakoya.training.run_log import RunLog
from terakoya.training.setup import build_trainer
from terakoya_planning import fake_step
from terakoya_planning.estimate import estimate

PRESETS = Path(__file__).parents[3] / "parameters"


def preset(name: str, store: Path, **changes: Any) -> Parameters:
    """The preset `name` on `store`, a few short rows per step; `changes` replace whole keys."""
    raw = json.loads((PRESETS / f"{name}.json").read_text())
    raw |= {"data": {"train": [str(store)], "sequence_length": 64}, "batch_size": {"-1": 8}, "evaluation": None}
    return Parameters.from_dict(raw | {"trackers": [], "precision": "fp32"} | changes, source=name)


def allocated(parameters: Parameters, out: Path) -> int:
    """The peak of the bytes from torch's allocator, from the model's first weight to the end of the second optimizer
    step, as recorded by torch's profiler."""
    context = connect(LaunchInfo.from_environment())
    run_log = RunLog(out, (), {}, active=False)
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # what an earlier test's profiler saw begin would, freed while this one watches, count as less memory
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        trainer = build_trainer(parameters, out, Stores.open(parameters.data), context, run_log)
        for _ in range(2):
            trainer.one_step()
    (most,) = most_at_once(profiler)
    return most


@pytest.mark.parametrize(
    ("name", "precision", "optimizer", "micro_batch_size", "changes"),
    at_night(
        [
            ("tiny_gpt2", "fp32", "adamw", 8, {}),
            ("tiny_gpt2", "bf16", "adafactor", 4, {}),
            ("tiny_llama", "bf16", "adamw", 8, {"activation_checkpointing": "full"}),
            ("tiny_llama", "fp32", "adafactor", 4, {}),
            ("tiny_bert", "fp32", "adafactor", 8, {}),
            ("tiny_bert", "bf16", "adamw", 4, {}),
            ("tiny_electra", "bf16", "adafactor", 8, {}),
            ("tiny_electra", "fp32", "adamw", 4, {}),
        ],
        always=[("tiny_llama", "bf16", "adamw", 8, {"activation_checkpointing": "full"})],
    ),
)
def test_estimates_are_within_ten_percent_of_what_two_real_steps_allocate(
    name: str,
    precision: str,
    optimizer: str,
    micro_batch_size: int,
    changes: dict[str, Any],
    store: Path,
    tmp_path: Path,
) -> None:
    parameters = preset(
        name, store, precision=precision, optimizer={"type": optimizer}, micro_batch_size=micro_batch_size, **changes
    )
    real = allocated(parameters, tmp_path)
    found = estimate(parameters, device="cpu").memory
    assert found.peak == pytest.approx(real, rel=0.1)


def test_deeper_models_are_extrapolated_from_two_smaller_ones(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.loads((PRESETS / "tiny_llama.json").read_text())["architecture"]
    parameters = preset("tiny_llama", store, architecture={**raw, "num_hidden_layers": 7})
    vocabulary = synthetic_vocabulary(500, 64)
    found = fake_step.simulate_step(parameters, vocabulary, rows=4, gradients_stay=False)
    assert found.depths == (2, 4)
    monkeypatch.setattr(fake_step, "DEPTHS", (2, 7))
    whole = fake_step.simulate_step(parameters, vocabulary, rows=4, gradients_stay=False)
    assert whole.depths == ()
    assert found.optimizer_bytes == whole.optimizer_bytes
    for window, parts in whole.windows.items():
        assert sum(found.windows[window].values()) == pytest.approx(sum(parts.values()), rel=0.02), window


@pytest.mark.parametrize("name", at_night(["tiny_gpt2", "tiny_electra"], always=["tiny_electra"]))
def test_checkpoints_take_the_estimated_space(name: str, store: Path, tmp_path: Path) -> None:
    parameters = preset(name, store, max_steps=1)
    found = estimate(parameters, device="cpu")
    terakoya.train(parameters, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    for part, expected in found.checkpoint.items():
        size = sum(each.stat().st_size for each in (saved / part).rglob("*.safetensors"))
        assert size == pytest.approx(expected, rel=0.01), part

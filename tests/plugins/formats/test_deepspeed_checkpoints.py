"""Checkpoints that DeepSpeed's engine saves from two processes, in every stage, are imported with identical weights.

One pair of processes saves all checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published_layouts as layouts
import pytest
import torch
import toy
from safetensors.torch import load_file
from selection import at_night, wanted
from torch import Tensor
from transformers import AutoModelForCausalLM

from terakoya_plugins.formats.deepspeed import DeepSpeed, read_weights

pytestmark = [
    pytest.mark.timeout(900),  # seconds on a quiet machine, minutes on one that is shared
]

JOBS: dict[str, dict[str, Any]] = {
    "stage 1": {"model": "gpt2", "stage": 1},
    "stage 2, frozen": {"model": "llama", "stage": 2, "frozen": ["model.layers.0.", "model.embed"]},
    "stage 3": {"model": "gpt2", "stage": 3},
    "stage 3, frozen": {"model": "llama", "stage": 3, "frozen": ["model.layers.0.", "model.embed"]},
    "stage 2, bf16": {"model": "gpt2, untied", "stage": 2, "bf16": True},
    "stage 3, bf16": {"model": "llama", "stage": 3, "bf16": True},
}


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the checkpoints, one sub-folder per job."""
    deepspeed_saver = pytest.importorskip("deepspeed_saver")  # imports deepspeed, an optional requirement
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs = [{"name": name, **job} for name, job in JOBS.items() if name in wanted(request, "name")]
    started = []
    for rank, variables in enumerate(toy.launched((2,))):
        output = folder / f"{rank}.txt"
        started.append(toy.Process(toy.fork(deepspeed_saver.process, jobs, folder, variables, output), output))
    toy.finish(started)
    return folder


def reference(folder: Path) -> dict[str, Tensor]:
    """Returns the engine's weights at the time of saving."""
    return load_file(folder / "reference.safetensors")


@pytest.mark.parametrize(
    "name", at_night([name for name, job in JOBS.items() if not job.get("bf16")], always=["stage 3, frozen"])
)
def test_weights_and_logits_equal_the_engines(name: str, saved: Path, tmp_path: Path) -> None:
    DeepSpeed().read(saved / name, tmp_path / "out")
    model = layouts.MODELS[JOBS[name]["model"]]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(reference(saved / name))
    layouts.same(tmp_path / "out", model)
    frozen = tuple(JOBS[name].get("frozen", ()))
    for key, value in model.state_dict().items():
        is_frozen = bool(frozen) and key.startswith(frozen)
        assert torch.equal(value, before[key]) == is_frozen, (
            f"{key}: training changes exactly the weights that are not frozen"
        )


@pytest.mark.parametrize(
    "name", at_night([name for name, job in JOBS.items() if job.get("bf16")], always=["stage 3, bf16"])
)
def test_in_bf16_the_optimizers_float32_weights_are_imported(name: str, saved: Path, tmp_path: Path) -> None:
    weights = read_weights(saved / name / "global_step2")
    expected = reference(saved / name)
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert value.dtype == torch.float32 and expected[key].dtype == torch.bfloat16
        assert torch.equal(value.bfloat16(), expected[key]), key
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights.values()), (
        "some weights need more precision than bf16"
    )
    DeepSpeed().read(saved / name, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())

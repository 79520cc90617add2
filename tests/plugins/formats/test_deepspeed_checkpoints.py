"""Checkpoints that DeepSpeed's engine saves from two processes, in every stage, are imported with identical weights.

One pair of processes runs `deepspeed_saver.py` for all checkpoints.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import published_layouts as layouts
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from terakoya_plugins.formats.deepspeed import DeepSpeed, read_weights

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all checkpoints, one sub-folder per job."""
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([{"name": name, **job} for name, job in JOBS.items()]), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(2):
        launched = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable,
            str(Path(__file__).parents[2] / "helpers" / "deepspeed_saver.py"),
            str(jobs),
            str(folder),
        ]
        environment = {**os.environ, **launched}
        started.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        for process in started:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return folder


def reference(folder: Path) -> dict[str, Tensor]:
    """Returns the engine's weights at the time of saving."""
    return load_file(folder / "reference.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if not job.get("bf16")])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.get("bf16")])
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

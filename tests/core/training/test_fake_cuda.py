"""Training steps on a CUDA device without data: every device is the right one, and no step waits for the device."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import toy

WORKER = Path(fake_cuda.__file__).with_name("fake_cuda_worker.py")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.compile_guard(tmp_path_factory.mktemp("guard"))


def take_steps(runs: Mapping[str, Any], guard: Path, out: Path) -> dict[str, dict[str, Any]]:
    """What the worker saw of each run."""
    command = [sys.executable, str(WORKER), str(out), json.dumps(runs)]
    environment = {**os.environ, "LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def run(store: Path, architecture: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return toy.parameters(
        store, architecture=dict(architecture), precision="bf16", micro_batch_size=8, logging_steps=100, **changes
    )


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
ENCODER = {**SIZES, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {**SIZES, "type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {**ENCODER, "type": "llama", "num_key_value_heads": 1}
CAUSAL = {"objective": {"type": "causal_lm"}}


@pytest.mark.slow
def test_one_process_trains_on_a_gpu(store: Path, guard: Path, tmp_path: Path) -> None:
    runs = {"sdpa": run(store, {"type": "bert", **ENCODER}), "flash": run(store, GPT2, **CAUSAL)}
    for name, seen in take_steps(runs, guard, tmp_path).items():
        assert seen["device"] == "cuda:0"
        assert seen["flash"] == (name == "flash")
        assert seen["operations"] > 100
        assert seen["waits"] == []


@pytest.mark.nightly
def test_no_architecture_waits_for_the_gpu(store: Path, guard: Path, tmp_path: Path) -> None:
    electra = {"objective": {"type": "replaced_token"}}
    runs = {
        "bert": run(store, {"type": "bert", **ENCODER, **NO_DROPOUT}),
        "roberta": run(store, {"type": "roberta", **ENCODER, "max_position_embeddings": 34}),
        "electra": run(
            store, {"type": "electra", **ENCODER, "num_attention_heads": 4, "embedding_size": 16}, **electra
        ),
        "deberta_v2": run(store, {"type": "deberta_v2", **ENCODER}),
        "modernbert": run(store, {"type": "modernbert", **ENCODER}),
        "gptj": run(store, {"type": "gptj", **SIZES, "rotary_dim": 8}, **CAUSAL),
        "llama": run(store, LLAMA, **CAUSAL),
        "llama, checkpointed": run(store, LLAMA, activation_checkpointing="full", **CAUSAL),
        "qwen3": run(store, {**LLAMA, "type": "qwen3"}, **CAUSAL),
        "adafactor": run(store, LLAMA, optimizer={"type": "adafactor"}, **CAUSAL),
        "lion": run(store, LLAMA, optimizer={"type": "lion", "learning_rate": 1e-4}, **CAUSAL),
        "muon": run(store, LLAMA, optimizer={"type": "muon", "learning_rate": 1e-3}, **CAUSAL),
    }
    seen = take_steps(runs, guard, tmp_path)
    assert {name: each["waits"] for name, each in seen.items() if each["waits"]} == {}
    assert {name for name, each in seen.items() if each["flash"]} >= {"bert", "modernbert", "llama", "qwen3"}

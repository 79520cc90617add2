"""What `estimate` says of each rank under DeepSpeed's stages, beside what two real processes hold."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.data.store import TokenStore
from terakoya.estimation import simulation
from terakoya.estimation.estimate import estimate, share_of
from terakoya.estimation.sharing import World, shared
from terakoya.parameters import Parameters

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

PRESETS = Path(__file__).parents[2] / "parameters"
WORKER = Path(__file__).with_name("zero_memory.py")
STAGES = (0, 1, 2, 3)
SIZES: dict[str, dict[str, Any]] = {
    "toy": {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "max_position_embeddings": 64},
    "tiny_gpt2": {},
}
MICRO_BATCHES = {"toy": 8, "tiny_gpt2": 4}
"""Rows of 8 on each process: the first in one micro-step, the second in two."""


def settings(name: str, stage: int, store: Path) -> dict[str, Any]:
    """The parameter JSON of a run of that size."""
    raw = json.loads((PRESETS / "tiny_gpt2.json").read_text())
    return {
        **raw,
        "architecture": {**raw["architecture"], **SIZES[name]},
        "data": {"train": [str(store)], "sequence_length": 64}, "evaluation": None, "trackers": [], "max_steps": 2,
        "batch_size": {"-1": 16}, "micro_batch_size": MICRO_BATCHES[name],
        "parallel": {"engine": "deepspeed", "zero_stage": stage},
    }  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy store."""
    return toy.make_store(tmp_path_factory.mktemp("zero") / "train", documents=60, seed=1)


@dataclass(frozen=True)
class Weighed:
    """By stage what each of two processes held, of a run of the size `name`."""

    name: str
    held: dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["toy", pytest.param("tiny_gpt2", marks=pytest.mark.nightly)])
def weighed(request: pytest.FixtureRequest, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Weighed:
    """What a run of each size held."""
    base = tmp_path_factory.mktemp("weighed")
    jobs = [{"settings": settings(request.param, stage, store), "out": str(base / str(stage))} for stage in STAGES]
    (base / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(base / "jobs.json")],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [each.communicate(timeout=1200)[0] for each in started]
    assert all(each.returncode == 0 for each in started), "\n".join(said)
    held = {
        stage: [json.loads((base / str(stage) / f"{rank}.json").read_text()) for rank in range(2)] for stage in STAGES
    }
    return Weighed(request.param, held)


@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_holds_what_was_said(stage: int, store: Path, weighed: Weighed) -> None:
    parameters = Parameters.from_dict(settings(weighed.name, stage, store), source="test")
    found = estimate(parameters, processes=2, device="cpu").memory
    vocabulary = TokenStore.open(store).facts.vocabulary
    share = share_of(parameters, 2)
    world = World(2, stage, share.micro_steps)
    one = simulation.simulate(
        parameters, vocabulary, rows=share.micro_batch_size, gradients_stay=world.gradients_stay, gpu=False
    )
    between = shared(one.windows, world, simulation.sizes(parameters, vocabulary, context=64.0))[simulation.STEP]
    for real in weighed.held[stage]:
        assert found.peak == pytest.approx(real["peak"], rel=0.1), (found.moment, found.moments)
        for part in ("weights", "optimizer"):
            assert between[part] == pytest.approx(real["rest"][part], rel=0.1), part

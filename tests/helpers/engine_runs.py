"""Runs of every engine next to those of one process: their parameters, their start, how their weights compare."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed_worker
import pytest
import torch
import toy

from terakoya.config.parameters import Parameters
from terakoya.training.setup import StartOptions, train_in_this_process

STAGES = (0, 1, 2, 3)


LAST, MIDDLE = 4, 2


def settings(store: Path, validation: Path, stage: int | None, rows: dict[str, int], **changes: Any) -> dict[str, Any]:
    """The parameter JSON; `stage` None is without DeepSpeed."""
    base = toy.parameters(store, validation, batch_size=rows, micro_batch_size=2, max_steps=LAST)
    shape = {"hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 33, "num_hidden_layers": 1}
    return {
        **base,
        "architecture": toy.without_dropout({**base["architecture"], **shape}),
        # with a large eps the update is nearly proportional to the gradient, so that errors show as they are
        "optimizer": {"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.1},
        "checkpoint": {"save_steps": MIDDLE},
        "evaluation": {"steps": MIDDLE, "batches": 2},
        **({} if stage is None else {"parallel": {"engine": "deepspeed", "zero_stage": stage}}),
        **changes,
    }


HALF = {
    "precision": "fp16", "evaluation": None,
    "loss_scaling": {"init_scale": 2.0**40, "backoff_factor": 2.0**-24},
}  # fmt: skip
"""The first step overflows, wherever; from then on the scale does."""


LION = {"optimizer": {"type": "lion", "learning_rate": 1e-3, "weight_decay": 0.1}, "evaluation": None}


UNVALIDATED: dict[str, Any] = {"evaluation": None}
"""For runs whose validation no test reads."""


def start(jobs: Sequence[dict[str, Any]], folder: Path, processes: int) -> list[toy.Process]:
    """Starts a world of forked processes that runs `jobs`; a single process gets no launcher's variables."""
    folder.mkdir(exist_ok=True)
    started = []
    for rank, variables in enumerate(toy.launched((1,) * processes)):
        output = folder / f"jobs{processes}.{rank}.txt"
        started.append(toy.Process(toy.fork(deepspeed_worker.process, jobs, variables, output), output))
    return started


def run_in_a_new_process(jobs: Sequence[dict[str, Any]], file: Path) -> str:
    """Runs `jobs`, written to `file`, in one process that is not forked; returns what it printed."""
    file.write_text(json.dumps(jobs))
    found = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # helpers as they lie here
    done = subprocess.run(
        [sys.executable, deepspeed_worker.__file__, str(file)],
        env={**os.environ, **found}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def checkpoint(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step:08d}"


def state(out: Path, kind: str, step: int = LAST) -> dict[str, torch.Tensor]:
    return toy.saved(checkpoint(out, step), kind)


def here(out: Path, parameters: dict[str, Any], start_from: Path | None = None) -> None:
    """Trains in this process without DeepSpeed."""
    if start_from is not None:
        shutil.copytree(start_from, out / "checkpoints" / start_from.name)
    train_in_this_process(
        Parameters.from_dict(parameters, source="test"), out, StartOptions(allow_change=frozenset({"parallel"}))
    )


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor's error relative to the tensor's own norm."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.shape == second[name].shape, name
        error = (value.double() - second[name].double()).norm() / value.double().norm().clamp(min=1e-6)
        assert error <= tolerance, f"{name}: {error:.1e}"


def assert_same_losses(first: Path, second: Path, tolerance: float) -> None:
    mine, theirs = toy.losses(first), toy.losses(second)
    assert theirs and max(theirs) in mine
    for step in theirs:
        assert mine[step] == pytest.approx(theirs[step], rel=tolerance, abs=0.0), step

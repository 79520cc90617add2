"""The moving average of the weights: numpy's in float64, the same after a resume, exported as a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from safetensors.torch import load_file
from selection import at_night
from transformers import AutoModelForMaskedLM

from terakoya import train
from terakoya.conversion.export import export
from terakoya.errors import UserError
from terakoya.runs.checkpoints import find_problems, read_manifest
from terakoya.toolkit.formats import folder_digests

SETTINGS = {"decay": 0.6, "every": 2, "from_step": 3}
LAST = 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_store(tmp_path_factory.mktemp("ema") / "store", documents=100, seed=1)


def settings(store: Path, *, ema: Mapping[str, Any] | None = None, steps: int = LAST, **changes: Any) -> dict[str, Any]:
    changes |= {"events": {"ema": ema}} if ema is not None else {}
    fixed: dict[str, Any] = {"checkpoint": {"save_steps": 5, "keep": 4}, "schedule": {"type": "constant"}}
    return toy.parameters(store, max_steps=steps, **fixed, **changes)


def folder(run: Path, step: int = LAST) -> Path:
    return run / f"checkpoints/step-{step:08d}"


def averages(run: Path, step: int = LAST) -> dict[str, torch.Tensor]:
    return load_file(folder(run, step) / "events/ema.safetensors")


@pytest.fixture(scope="module")
def straight(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """A run, and its weights in float64 after each step, beginning with none for step 0."""
    out = tmp_path_factory.mktemp("straight") / "run"
    weights: list[dict[str, np.ndarray]] = [{}]

    def note(run: Any, report: Any) -> None:
        values = {name: value.detach().double().numpy().copy() for name, value in run.module.named_parameters()}
        weights.append(values)

    train(settings(store, ema=SETTINGS), out, events={"step_finished": note})
    return out, weights


def test_the_average_is_that_of_float64(straight: tuple[Path, list[dict[str, np.ndarray]]]) -> None:
    run, weights = straight
    expected, updates = weights[3], 0
    for step in range(4, LAST + 1):
        if step % 2 == 0:
            updates += 1
            decay = min(0.6, (1 + updates) / (10 + updates))
            expected = {name: decay * expected[name] + (1 - decay) * weights[step][name] for name in expected}
    found = averages(run)
    assert found.keys() == expected.keys()
    assert read_manifest(folder(run))["events"]["ema"] == {"updates": updates} == {"updates": 4}
    for name, value in found.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=0, atol=1e-7)
    assert any(np.abs(expected[name] - weights[LAST][name]).max() > 1e-3 for name in expected)  # an average it is


@pytest.mark.parametrize("background", at_night([False, True], always=[True]))
def test_a_resumed_run_has_the_same_average_bit_for_bit(
    background: bool, store: Path, straight: tuple[Path, Any], tmp_path: Path
) -> None:
    checkpoint = {"save_steps": 5, "keep": 4, "async_save": background}
    for steps in (5, LAST):
        train({**settings(store, ema=SETTINGS, steps=steps), "checkpoint": checkpoint}, tmp_path)
    mine, theirs = averages(tmp_path), averages(straight[0])
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    file = folder(tmp_path) / "events/ema.safetensors"
    assert find_problems(folder(tmp_path)) == []
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    assert any("events/ema.safetensors" in problem for problem in find_problems(folder(tmp_path)))


def test_what_a_checkpoint_lacks_or_a_run_no_longer_keeps_is_told(
    store: Path, tmp_path: Path, straight: tuple[Path, Any]
) -> None:
    def warned() -> list[str]:
        records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [each["text"] for each in records if each["kind"] == "warning"]

    train(settings(store, steps=5), tmp_path)
    with pytest.raises(UserError, match="expected weights of an event plugin ema, such as ema; its run has none"):
        export(tmp_path, tmp_path / "model", weights="ema")
    train(settings(store, ema={**SETTINGS, "from_step": 8}, steps=6), tmp_path)
    assert warned() == ["events.ema: step-00000005 holds nothing of it, so it begins anew"]
    assert averages(tmp_path, 6) == {}
    with pytest.raises(UserError, match="the event plugin ema has no weights yet at this step; export a later one"):
        export(tmp_path, tmp_path / "model", weights="ema")
    train(settings(store, ema={**SETTINGS, "from_step": 8}, steps=9), tmp_path)  # nothing is missing there
    train(settings(store, steps=LAST), tmp_path)
    assert warned()[1:] == ["events.ema is off: what it kept in step-00000009 ends there"]
    assert not (folder(tmp_path) / "events").exists()


def test_the_average_is_exported_as_a_model(straight: tuple[Path, Any], tmp_path: Path) -> None:
    run = straight[0]
    done = export(run, tmp_path / "ema", weights="ema")
    export(run, tmp_path / "plain")
    assert done.models == {"": "BertForMaskedLM"}
    ours, plain = (AutoModelForMaskedLM.from_pretrained(tmp_path / name) for name in ("ema", "plain"))
    expected = {name.removeprefix("model."): value for name, value in averages(run).items()}
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    assert not torch.equal(parameters["cls.predictions.bias"], plain.cls.predictions.bias)
    origins = [folder_digests.read_place(tmp_path / name) for name in ("ema", "plain")]
    assert origins == [None, f"{run.name}/checkpoints/{folder(run).name}"], "no checkpoint has an average as its model"
    with pytest.raises(UserError, match="--weights ema: expected a run or a checkpoint, got a Transformers model"):
        export(tmp_path / "plain", tmp_path / "again", weights="ema")

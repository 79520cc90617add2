"""A manifest that is written in the background holds the numbers of its own step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.training import setup
from terakoya.training.checkpoint import checkpoint
from terakoya.training.trainer import Trainer


@pytest.mark.slow
def test_steps_after_a_save_do_not_change_what_it_records(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of step 2 waits for step 3, which adds its loss to the same meters."""
    trainers: list[Trainer] = []
    build, commit = setup.build_trainer, checkpoint._commit

    def build_and_keep(*arguments: Any, **options: Any) -> Trainer:
        trainers.append(build(*arguments, **options))
        return trainers[-1]

    def commit_late(staging: Path, final: Path, facts: Any, written: Any) -> None:
        deadline = time.monotonic() + 60
        while final.name == "step-00000002" and trainers[-1].run.step < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        commit(staging, final, facts, written)

    monkeypatch.setattr(setup, "build_trainer", build_and_keep)
    meters = {}
    for name, in_background in (("straight", False), ("background", True)):
        if in_background:
            monkeypatch.setattr(checkpoint, "_commit", commit_late)
        saves = {"save_steps": 2, "keep": 9, "async_save": in_background}
        settings = toy.parameters(store, max_steps=4, logging_steps=4, checkpoint=saves)
        setup.train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / name)
        manifest = json.loads((tmp_path / name / "checkpoints/step-00000002/manifest.json").read_text())
        meters[name] = manifest["meters"], manifest["step_health"]
    assert meters["background"] == meters["straight"]

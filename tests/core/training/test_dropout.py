"""Dropout drops something else in every step, micro-step and process, and the same again after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import toy

PROBE = Path(toy.__file__).with_name("dropout_probe.py")


@pytest.mark.slow
def test_dropout_differs_everywhere_and_resumes(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(
        store, architecture={**toy.parameters(store)["architecture"], "hidden_dropout_prob": 0.5},
        max_steps=2, batch_size={"-1": 8}, micro_batch_size=2, checkpoint={"save_steps": 1},
    )  # fmt: skip

    def dropped(name: str) -> list[list[str]]:
        """What the first dropout drops in each micro-step of each process."""
        probe = tmp_path / f"{name}-probe"
        probe.mkdir()
        toy.train(settings, tmp_path / name, nodes=(2,), plugins=[PROBE], environment={"DROPOUT_PROBE": str(probe)})
        return [(probe / f"rank-{rank}.txt").read_text().split() for rank in (0, 1)]

    whole = dropped("whole")
    assert [len(masks) for masks in whole] == [4, 4], "two steps of two micro-steps in two processes"
    assert len({mask for masks in whole for mask in masks}) == 8
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000002")
    assert dropped("resumed") == [masks[2:] for masks in whole]

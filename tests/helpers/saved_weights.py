"""Weights of checkpoints, compared."""

from __future__ import annotations

from pathlib import Path

import torch
import toy

FAULTS = [Path(__file__).with_name("faults.py")]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return toy.saved(out / f"checkpoints/step-{step:08d}")


def same_weights(first: Path, second: Path, step: int) -> bool:
    one, two = weights(first, step), weights(second, step)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def relative_error(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    difference = sum((first[name].double() - second[name].double()).square().sum() for name in first)
    return float((difference / sum(first[name].double().square().sum() for name in first)).sqrt())

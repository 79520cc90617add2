"""A plugin whose optimizer keeps something of each weight before it has seen a gradient: loaded by the tests."""

from __future__ import annotations

import torch

from terakoya import hookimpl
from terakoya.components import Optimizer

BEGIN, EPS = 0.5, 1e-10


class Adagrad(Optimizer):
    """torch's Adagrad (Duchi et al., 2011)."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            module.parameters(), lr=self.learning_rate, initial_accumulator_value=BEGIN, eps=EPS, fused=fused
        )


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    return {"adagrad": Adagrad}

"""Models whose weights bf16 holds, beside themselves in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def rounded(module: Module) -> Module:
    """`module` with other weights, all of which bf16 holds."""
    with torch.no_grad():
        for each in module.parameters():
            each.copy_((each + 0.1 * torch.randn_like(each)).bfloat16())
    return module


class Given(nn.Module):
    """Dropout of a quarter that keeps what another has kept, sum by sum."""

    def __init__(self, kept: Callable[[], Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, states: Tensor) -> Tensor:
        return states * self.kept().view(states.shape) / 0.75


def replace_dropouts(exact: Any, make: Callable[[], nn.Module]) -> None:
    """Gives each sum of the encoder `exact` the dropout that `make` returns."""
    for each in exact.encoder.modules():
        if type(each).__name__.endswith("Output"):
            each.dropout = make()


def errors(
    model: nn.Module, exact: nn.Module, *, watching: contextlib.AbstractContextManager[Any] | None = None
) -> dict[str, float]:
    """How far the hidden states and all gradients of `model` under autocast are from those of `exact`, by name: the
    norm of the difference over that of the exact one, or over a hundredth of the largest where that is more, since the
    gradients of the biases of keys are 0. `watching` is open while `model` runs."""
    ids, weights = torch.arange(48).view(2, 24) % 7 + 1, torch.randn(2, 24, 32)
    with watching or contextlib.nullcontext():
        with torch.autocast("cpu", torch.bfloat16):
            result = model(ids).last_hidden_state
        (result.double() * weights).sum().backward()
    assert result.dtype == torch.bfloat16
    expected = exact(ids).last_hidden_state
    (expected * weights).sum().backward()
    wanted = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    least = 0.01 * max(float(each.norm()) for each in wanted.values())
    got = {name: each.grad for name, each in model.named_parameters() if name in wanted and each.grad is not None}
    assert got.keys() == wanted.keys() and all(each.dtype == torch.float32 for each in got.values())
    found = {
        name: float((got[name].double() - each).norm()) / max(float(each.norm()), least)
        for name, each in wanted.items()
    }
    return found | {"result": float((result.detach().double() - expected.detach()).norm() / expected.detach().norm())}

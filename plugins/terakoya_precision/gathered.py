"""Weights that an engine gathers for each use, in bf16, in the place of copies.

Gradients of the stream are float32, which a gathered weight takes (torch's `grad_dtype`). A compiled block would round
those that it returns for a bf16 weight. So its layers have float32 stand-ins for weights, of their shapes and without
memory: functions of the stream read what is gathered, and return their gradients for the stand-ins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terakoya_precision.bf16_encoder_blocks import COPIES
from terakoya_precision.bf16_functions import DTYPE


class StandIn(torch.autograd.Function):
    """A float32 tensor of the shape of a weight, all of one number, whose gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, weight: Tensor) -> Tensor:
        return number.expand(weight.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def take_gathered(device: torch.device, *, compiled: bool) -> Callable[[nn.Module, Any], None]:
    """Returns a hook before the forward of a group, which gives its layers what was gathered on `device` as copies,
    and, where they are `compiled`, stand-ins as weights, until they are parts again. What is gathered in float32 is
    rounded for each forward."""
    number = torch.full((), math.nan, device=device)  # who reads a stand-in has no numbers
    found: list[tuple[nn.Module, str, nn.Parameter]] = []

    def take(group: nn.Module, _: Any) -> None:
        if not found:
            found.extend(_gathered_weights(group))
            for layer, name, value in found:
                value.grad_dtype = torch.float32
                getattr(layer, COPIES)[name] = value.detach()
        for layer, name, value in found:
            if value.dtype != DTYPE:
                getattr(layer, COPIES)[name] = value.detach().to(DTYPE)
            elif compiled and value.requires_grad:
                layer._parameters[name] = StandIn.apply(number, value)

    return take


def _gathered_weights(group: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yields each layer of the stream in `group`, its weights and their names, of those that are gathered now."""
    for layer in group.modules():
        for name, value in layer._parameters.items() if COPIES in layer.__dict__ else ():
            if isinstance(value, nn.Parameter) and not hasattr(value, "placements"):  # a DTensor's, which is a part
                yield layer, name, value

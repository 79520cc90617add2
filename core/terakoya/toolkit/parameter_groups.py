"""Which weights an optimizer decays: matrices, and not biases and norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def dimensions(parameter: nn.Parameter) -> int:
    """The dimensions of `parameter`. ZeRO-3 leaves an empty one behind and keeps the true shape aside."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: `parameters` of two and more dimensions with `weight_decay`, then the others
    without. An empty one is left out."""
    given = list(parameters)
    groups = [
        {"params": [each for each in given if dimensions(each) >= 2], "weight_decay": weight_decay},
        {"params": [each for each in given if dimensions(each) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that are trained, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]

"""Parameter groups of optimizers: weight decay for matrices, none for biases and norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def dimensions(parameter: nn.Parameter) -> int:
    """Returns the number of dimensions of `parameter`. Under ZeRO-3 a parameter is empty, and `ds_shape` is its
    true shape."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns groups for a torch optimizer: `parameters` of two and more dimensions with `weight_decay`, then the
    others without. Empty groups are left out."""
    parameters = list(parameters)
    groups = [
        {"params": [value for value in parameters if dimensions(value) >= 2], "weight_decay": weight_decay},
        {"params": [value for value in parameters if dimensions(value) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable parameters of `module`, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]

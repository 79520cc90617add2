"""Parameter groups of optimizers: weight decay for matrices, none for biases and norms; and tensors of one shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor, nn


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


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


def of_one_shape(parameters: Iterable[Tensor], most: int) -> Iterator[Sequence[Tensor]]:
    """Yields those of `parameters` that have a gradient, by shape: together at most `most` elements, or one tensor."""
    by_shape: dict[object, list[Tensor]] = defaultdict(list)
    for each in parameters:
        if each.grad is not None:
            by_shape[each.shape, each.dtype, each.device].append(each)
    for tensors in by_shape.values():
        at_once = max(1, most // max(1, tensors[0].numel()))
        for start in range(0, len(tensors), at_once):
            yield tensors[start : start + at_once]

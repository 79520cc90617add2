"""Scales of 8-bit products in layers of which each process has a part: those of whole tensors."""

from __future__ import annotations

from types import MethodType
from typing import Any, Protocol

from torch import Tensor, nn

from terakoya.errors import UserError

MULTIPLE = 16
"""What the widths of an 8-bit product are multiples of (`torch._scaled_mm`)."""


class Group(Protocol):
    """The processes that divide layers: a `TensorParallelGroup`."""

    @property
    def size(self) -> int:
        """Their number."""

    def all_reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """Returns the largest of all processes' `values`."""


def multiplies(layer: nn.Module) -> bool:
    """Whether `convert` made `layer` multiply in 8 bits."""
    return hasattr(layer, "linear_mm_config")


def share_scales(layer: Any, group: Group, *, inputs: bool, outputs: bool) -> None:
    """Makes `layer`, of which this process of `group` has a part, scale as the whole layer does, if it multiplies in 8
    bits.

    Args:
        inputs: whether a process has a part of the inputs.
        outputs: whether a process has a part of the outputs. If not, it computes a part of their sum, and the layer
            leaves its bias to be added to that.

    Raises:
        UserError: the part is too narrow for 8-bit products. Which layers are in 8 bits depends on whole ones alone.
    """
    if not multiplies(layer):
        return
    from terakoya_parallel import fp8_parts

    part = layer.in_features, layer.out_features
    if any(width % MULTIPLE for width in part):
        whole = part[0] * (group.size if inputs else 1), part[1] * (group.size if outputs else 1)
        raise UserError(
            f'precision: "fp8" needs widths divisible by {MULTIPLE} in each process, but of a layer with {whole[0]} '
            f"inputs and {whole[1]} outputs parallel.tp_size {group.size} leaves {part[0]} and {part[1]}; use a "
            'smaller one, or "bf16"'
        )
    layer.__dict__.update(scaling_group=group, shares_inputs=inputs, shares_outputs=outputs)
    layer.__dict__["forward"] = MethodType(fp8_parts.multiply, layer)  # a method: blocks share their graphs

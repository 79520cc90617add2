"""Products in 8 bits in layers that the processes of a tensor-parallel group divide.

torchao's layer scales each operand by its largest value. Where each process has a part of an operand, the largest value
is all-reduced here: the maximum is exact, so that every number becomes the 8 bits that it becomes in one process.
torchao then gets operands and gradients that are cast already. This module needs torchao.

Letters in shapes: K inputs and N outputs of a layer on this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.float8.float8_linear import GemmInputRole, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax


def multiply(layer: Any, hidden: Tensor) -> Tensor:
    """Returns the outputs (..., N) of `layer`, with the attributes of `share_scales`, for `hidden` (..., K). Where they
    are parts of sums, they are without the bias, which whoever divided the layer adds to the sum."""
    if torch.is_autocast_enabled("cuda"):  # as torchao's layer does
        hidden = hidden.to(torch.get_autocast_dtype("cuda"))
    if layer.shares_inputs:
        hidden = _cast(hidden, GemmInputRole.INPUT, layer.config.cast_config_input, layer)
    weight = _cast(layer.weight.t(), GemmInputRole.WEIGHT, layer.config.cast_config_weight, layer)
    product: Tensor = matmul_with_hp_or_float8_args.apply(hidden, weight, layer.linear_mm_config, layer.config)
    if not layer.shares_outputs:
        return product
    product = _CastGradient.apply(product, layer)
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def _cast(part: Tensor, role: Any, config: Any, layer: Any) -> Tensor:
    """Returns `part` in 8 bits, with the scale of the whole tensor."""
    with torch.no_grad():
        largest = layer.scaling_group.all_reduce(tensor_to_amax(part).float(), largest=True)
        scale = amax_to_scale(largest, config.target_dtype)
    cast: Tensor = hp_tensor_and_scale_to_float8(part, scale, config.target_dtype, layer.linear_mm_config, role)
    return cast


class _CastGradient(torch.autograd.Function):
    """Leaves the product of `layer` as it is, and casts its gradient."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        config = ctx.layer.config.cast_config_grad_output
        return _cast(gradients[0].contiguous(), GemmInputRole.GRAD_OUTPUT, config, ctx.layer), None

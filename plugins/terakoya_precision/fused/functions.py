"""Functions of the bf16 stream whose passes the fused kernels share, in the place of those of `bf16_functions`.

The gradient of a linear layer's bias is the sum over rows of a gradient that another function writes: that function
takes the bias, too, and returns its gradient from the same pass. The product itself then gets no bias to learn.

Letters in shapes: N positions, I inputs, O outputs, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terakoya_precision.bf16_functions import OURS, Branch, is_ours, join, weight_gradient
from terakoya_precision.fused import ops


class FusedSumNorm(torch.autograd.Function):
    """Where a residual sum ends: the layer norm of states (..., H) after dropout plus the residual (..., H). The
    states are the result of a linear layer with the bias `before` (H,), if it is given."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        before: Tensor | None,
        weight_copy: Tensor,
        bias_copy: Tensor,
        eps: float,
        dropout: float,
    ) -> Tensor:
        ctx.dropout, width = dropout, states.shape[-1]
        seed = ops.draw_seed(states.device) if dropout else None
        normed, total, mean, deviation = ops.sum_norm(
            states.reshape(-1, width), residual.reshape(-1, width), weight_copy, bias_copy, seed, dropout, eps
        )
        ctx.save_for_backward(total, mean, deviation, weight_copy, seed)
        return normed.view(states.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, deviation, weight_copy, seed = ctx.saved_tensors
        _, _, needs_weight, needs_bias, needs_before, *_ = ctx.needs_input_grad
        of_total, of_states, parts = ops.sum_norm_backward(
            gradient.reshape(total.shape), total, mean, deviation, weight_copy, seed, ctx.dropout
        )
        of_total = of_total.view(gradient.shape)
        if seed is None:
            of_states = of_total
        elif not torch.compiler.is_compiling():
            setattr(of_total, OURS, True)
        of_weight, of_bias, of_before = (
            ops.column_sums(parts).unbind() if any(ctx.needs_input_grad[2:5]) else [None] * 3
        )
        return (
            of_states.view(gradient.shape), of_total, of_weight if needs_weight else None,
            of_bias if needs_bias else None, of_before if needs_before else None, None, None, None, None,
        )  # fmt: skip


class FusedGelu(torch.autograd.Function):
    """GELU of states (..., O) that are the result of a linear layer with the bias `before` (O,), if it is given."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, before: Tensor | None, approximate: str) -> Tensor:
        ctx.save_for_backward(states)
        ctx.approximate = approximate
        return F.gelu(states, approximate=approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = ctx.saved_tensors
        rows = states.reshape(-1, states.shape[-1])
        of_states, parts = ops.gelu_backward(gradient.reshape(rows.shape), rows, ctx.approximate)
        return of_states.view(states.shape), ops.column_sums(parts) if ctx.needs_input_grad[1] else None, None


class FusedBranch(Branch):
    """Where a residual sum begins, with one linear layer or with queries, keys and values, of one width and all of
    which learn: the gradients of these three are put side by side, and are one operand from there on."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, *read = ctx.saved_tensors
        needs_states, _, _, needs_weight, *_ = ctx.needs_input_grad
        needs_bias = ctx.needs_input_grad[3 + len(ctx.outputs)]
        rows = states.reshape(-1, states.shape[-1])
        of_products = [each.reshape(len(rows), -1) for each in gradients[:-1]]
        of_states = of_weight = of_bias = None
        if len(of_products) > 1:
            operand, parts = ops.join(*of_products)
            of_bias = ops.column_sums(parts) if needs_bias else None
        else:
            (operand,) = of_products
            of_bias = operand.sum(0, dtype=torch.float32) if needs_bias else None
        if needs_states:
            of_states = add_product(gradients[-1], operand, join(read))
        if needs_weight:
            of_weight = weight_gradient(operand.t(), rows, ctx.totals[0])
        of_weights, of_biases = (
            [None] * len(ctx.outputs) if each is None else each.split(ctx.outputs) for each in (of_weight, of_bias)
        )
        return of_states, None, None, *of_weights, *of_biases, *([None] * (len(ctx.outputs) + len(read)))


def add_product(summand: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns `summand` (..., H) plus the product of `left` (N, C) and `right` (C, H); in the memory of `summand` where
    nobody else reads it, which a compiler finds out itself."""
    total = summand if is_ours(summand) else summand.clone(memory_format=torch.contiguous_format)
    ops.add_product_(total.view(-1, total.shape[-1]), left, right)
    return total

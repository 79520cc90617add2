"""Functions of the bf16 stream, forward and backward: products, sums with norms, and rows of embeddings.

They read bf16 copies of weights, and return float32 gradients for the weights themselves.

Letters in shapes: N positions, I inputs, O outputs, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terakoya.toolkit.torch_operations import operation

DTYPE = torch.bfloat16
OURS = "terakoya_may_overwrite"
"""The attribute of a gradient that a function below made and gave to nobody but the function that receives it. A
gradient that autograd adds up, changes or makes itself is another tensor, without it."""


class Product(torch.autograd.Function):
    """A linear layer of bf16 copies whose gradients go to the float32 weights. It takes rows (N, I): of an input with
    more dimensions torch would return a view, which models may not change in place. Copies may have rows that the
    weights have not, in which gradients are cut off. With a `total`, see `weight_gradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_copy: Tensor,
        bias_copy: Tensor | None,
        outputs_first: bool,
        total: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight_copy)
        ctx.outputs_first, ctx.outputs, ctx.total = outputs_first, len(weight), total
        return F.linear(rows, weight_copy if outputs_first else weight_copy.t(), bias_copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_rows = of_weight = of_bias = None
        if needs_rows:
            of_rows = gradient @ (weight if ctx.outputs_first else weight.t())
        if needs_weight:
            left, right = (gradient.t(), rows) if ctx.outputs_first else (rows.t(), gradient)
            of_weight = weight_gradient(left, right, ctx.total)
        if needs_bias:
            of_bias = gradient.sum(0, dtype=torch.float32)
        if ctx.outputs_first and len(weight) > ctx.outputs:
            for each in (of_weight, of_bias):
                if each is not None:  # in place: to a view autograd cannot add a tied embedding's gradient in place
                    each.resize_(ctx.outputs, *each.shape[1:])
        return of_rows, of_weight, of_bias, None, None, None, None


class Rounded(torch.autograd.Function):
    """A weight's bf16 copy in the forward; its gradient becomes float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


def float_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the product of two bf16 matrices in float32. Only a GPU's kernel can return its float32 sums; elsewhere
    they are rounded to bf16 first, as under autocast."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def weight_gradient(left: Tensor, right: Tensor, total: Tensor | None) -> Tensor | None:
    """Returns the gradient of a weight, the product of two bf16 matrices in float32; None where it is added to `total`,
    the gradient of the micro-steps before. Autograd would write it, and read both again to add them up."""
    if total is None:
        return float_product(left, right)
    add_float_product_(total, left, right)
    return None


@operation(lambda total, left, right: None, changes=("total",))
def add_float_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of `left` (O, N) and `right` (N, I) bf16 to `total` (O, I) float32: on a GPU as the product's
    float32 sums, elsewhere those of `float_product`."""
    if total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(left, right))


def adds_float_products(device: torch.device) -> bool:
    """Whether `add_float_product_` adds on `device`, tried once: older releases of torch take a bf16 summand alone."""
    total, ones = torch.full((16, 16), 0.5, device=device), torch.ones(16, 16, dtype=DTYPE, device=device)
    try:
        add_float_product_(total, ones, ones)
    except RuntimeError:
        return False
    return bool((total == 16.5).all())


class Rows(torch.autograd.Function):
    """Rows of an embedding's bf16 copy. Their gradients are added up in float32: in bf16, a frequent token such as
    `[MASK]` would lose most of its thousands of summands. With `row_ids`, see `small_table_gradient`."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, weight_copy: Tensor, padding_id: int | None, row_ids: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(ids, row_ids)
        ctx.rows, ctx.padding_id = len(weight), -1 if padding_id is None else padding_id
        return F.embedding(ids, weight_copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, row_ids = ctx.saved_tensors
        if row_ids is None:
            of_weight = embedding_gradient(gradient.float(), ids, ctx.rows, ctx.padding_id)
        else:
            of_weight = small_table_gradient(gradient, ids, row_ids)
        return None, of_weight, None, None, None


def small_table_gradient(gradient: Tensor, ids: Tensor, row_ids: Tensor) -> Tensor:
    """Returns the gradient (R, H) float32 of an embedding of few rows for that of its result (..., H) bf16: the product
    with the matrix of which position has which row. torch's kernel adds up the positions of a row in few threads.

    Args:
        row_ids: the id of each row (R,), or one that no position has, so that the row has no gradient.
    """
    has_row = torch.empty(len(row_ids), ids.numel(), dtype=DTYPE, device=ids.device)
    torch.eq(ids.reshape(1, -1), row_ids[:, None], out=has_row)
    return float_product(has_row, gradient.reshape(-1, gradient.shape[-1]).to(DTYPE))


@operation(lambda gradient, ids, rows, padding_id: gradient.new_empty(rows, gradient.shape[-1]))
def embedding_gradient(gradient: Tensor, ids: Tensor, rows: int, padding_id: int) -> Tensor:
    """Returns the gradient (rows, H) of an embedding for that of its result (..., H). Of torch's own operation its
    compiler makes sums in any order, or, where they must be deterministic, sums of an id's rows one after another."""
    return torch.ops.aten.embedding_dense_backward(gradient, ids, rows, padding_id, False)


class Rotation(torch.autograd.Function):
    """Rotary positions of queries (..., D) and keys (..., D) by cosines and sines (..., D), which may be float32: the
    first half of a head's dimensions is rotated against the second. The gradient is the rotation back, so autograd has
    no halves to put together."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        first, second = sin.chunk(2, -1)
        signed = torch.cat([-first, second], -1)
        ctx.save_for_backward(cos, signed)
        return _rotate(query, cos, signed), _rotate(key, cos, signed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, signed = ctx.saved_tensors
        signed = _exchange_halves(signed)
        return _rotate(of_query, cos, signed), _rotate(of_key, cos, signed), None, None


def _rotate(states: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    return _convert(torch.addcmul(states * cos, _exchange_halves(states), signed), states.dtype)


def _convert(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the `result` of a forward in `dtype`. Where it is that already, torch 2.11 compiles `to` into a gradient
    of zero."""
    return result if result.dtype == dtype else result.to(dtype)


def _exchange_halves(states: Tensor) -> Tensor:
    """Returns `states` (..., D) with the halves of the last dimension exchanged."""
    return torch.cat(states.chunk(2, -1)[::-1], -1)


class Branch(torch.autograd.Function):
    """Where a residual sum begins: linear layers of the same states (..., I), and these states again, for the sum.

    What comes back through the sum is what the gradients of the products are added to, as they are computed. Several
    layers read copies that lie in one tensor, and are one product in the forward. What is gathered lies apart, and is
    put together in the forward and again in the backward, since in between it is not there.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, bias_copy: Tensor | None, count: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the result (..., O) of each layer, and `states`.

        Args:
            bias_copy: of all layers, one below the other.
            count: the number of layers.
            parameters: the weights of all layers, then their biases, then what the weights' gradients are added to,
                each None where there is none; then the copy of all weights, one below the other, or that of each.
        """
        weights, ctx.totals, read = parameters[:count], parameters[2 * count : 3 * count], parameters[3 * count :]
        ctx.outputs = [len(weight) for weight in weights if weight is not None]
        ctx.save_for_backward(states, *read)
        products = F.linear(states, join(read), bias_copy)
        parts = products.split(ctx.outputs, -1) if len(ctx.outputs) > 1 else (products,)
        return *parts, states.view_as(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, *read = ctx.saved_tensors
        rows = states.reshape(-1, states.shape[-1])
        of_products = [each.reshape(-1, each.shape[-1]) for each in gradients[:-1]]
        needs_states, _, _, *needed = ctx.needs_input_grad
        count = len(of_products)
        needs_weight, needs_bias = needed[:count], needed[count : 2 * count]
        of_states = None
        if needs_states:
            of_states = gradients[-1]
            weights = read if len(read) == count else read[0].split(ctx.outputs)
            if torch.compiler.is_compiling() and of_states.device.type == "cuda":
                of_states = sum_with_products(of_states, of_products, weights)
            else:
                of_states = of_states if is_ours(of_states) else of_states.clone(memory_format=torch.contiguous_format)
                for gradient, weight in zip(of_products, weights, strict=True):
                    of_states.view_as(rows).addmm_(gradient, weight)
        given = zip(of_products, needs_weight, ctx.totals, strict=True)
        of_weights = [weight_gradient(each.t(), rows, total) if needs else None for each, needs, total in given]
        pairs = zip(of_products, needs_bias, strict=True)
        of_biases = [each.sum(0, dtype=torch.float32) if needs else None for each, needs in pairs]
        return of_states, None, None, *of_weights, *of_biases, *([None] * (count + len(read)))


class Products(Branch):
    """Linear layers of the same states (..., I) where no residual sum begins. The gradients of their results are put
    side by side, where torch's compiler writes those that it computes, and are one operand from there on."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, bias_copy: Tensor | None, count: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the result (..., O) of each layer; see `Branch`."""
        return Branch.forward(ctx, states, bias_copy, count, *parameters)[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, *read = ctx.saved_tensors
        rows, count = states.reshape(-1, states.shape[-1]), len(ctx.outputs)
        operand = torch.cat([each.reshape(len(rows), -1) for each in gradients], 1)
        needs_states, _, _, *needed = ctx.needs_input_grad
        of_states = (operand @ join(read)).view_as(states) if needs_states else None
        parts: Sequence[Tensor] = operand.split(ctx.outputs, 1)
        of_weights: Sequence[Tensor | None]
        if all(needed[:count]) and ctx.totals == (None,) * count:
            of_weights = float_product(operand.t(), rows).split(ctx.outputs)
        else:
            given = zip(parts, needed[:count], ctx.totals, strict=True)
            of_weights = [weight_gradient(each.t(), rows, total) if needs else None for each, needs, total in given]
        pairs = zip(parts, needed[count : 2 * count], strict=True)
        of_biases = [each.sum(0, dtype=torch.float32) if needs else None for each, needs in pairs]
        return of_states, None, None, *of_weights, *of_biases, *([None] * (count + len(read)))


def join(copies: Sequence[Tensor | None]) -> Tensor:
    """Returns `copies` (O, ...), one below the other: a single one itself."""
    found = [each for each in copies if each is not None]
    return found[0] if len(found) == 1 else torch.cat(found)


class SumNorm(torch.autograd.Function):
    """Where a residual sum ends: the layer norm of states (..., H) after dropout plus the residual (..., H)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        weight_copy: Tensor,
        bias_copy: Tensor,
        eps: float,
        dropout: float,
    ) -> Tensor:
        ctx.scale = 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
        kept = None
        if dropout:
            kept = torch.empty_like(states, dtype=torch.bool).bernoulli_(1.0 - dropout)
            total = torch.addcmul(residual, states, kept, value=ctx.scale)
        else:
            total = states + residual
        normed, mean, deviation = torch.native_layer_norm(
            _wide(total), weight.shape, _wide(weight_copy), _wide(bias_copy), eps
        )
        ctx.save_for_backward(total, mean, deviation, weight_copy, bias_copy, kept)
        return _convert(normed, DTYPE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, deviation, weight_copy, bias_copy, kept = ctx.saved_tensors
        needs_states, needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_total, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            _wide(gradient.contiguous()), _wide(total), weight_copy.shape, mean, deviation, _wide(weight_copy),
            _wide(bias_copy), [needs_states or needs_residual, needs_weight, needs_bias],
        )  # fmt: skip
        of_states = of_total = of_total.to(DTYPE) if needs_states or needs_residual else None
        if kept is not None and of_total is not None:
            of_states = torch.ops.aten.native_dropout_backward(of_total, kept, ctx.scale)
            if not torch.compiler.is_compiling():
                setattr(of_total, OURS, True)
        return (
            of_states, of_total, of_weight.float() if needs_weight else None, of_bias.float() if needs_bias else None,
            None, None, None, None,
        )  # fmt: skip


def sum_with_products(summand: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns `summand` (..., I) plus the product of each of `left` (N, O) with its one of `right` (O, I), for a GPU's
    compiler: it adds all up in one kernel, where `addmm` would copy each time what it adds to. `summand` comes last,
    since the compiler makes `addmm` of a product that is added last."""
    products = [one @ other for one, other in zip(left, right, strict=True)]
    return summand + functools.reduce(torch.add, products).view_as(summand)


def is_ours(gradient: Tensor) -> bool:
    """Whether nobody else reads `gradient`. A compiler decides itself what is computed in place."""
    return not torch.compiler.is_compiling() and getattr(gradient, OURS, False)


def _wide(values: Tensor) -> Tensor:
    """Returns `values` as norms take them: a CPU's kernels for bf16 add up the gradients of weight and bias in bf16."""
    return values if values.device.type == "cuda" else values.float()

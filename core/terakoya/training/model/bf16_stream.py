"""The bf16 stream: layers read bf16 copies of their weights, and hidden states stay bf16 between them.

torch's autocast converts weights and hidden states at each use, and its norms return float32, so the residual stream is
float32 and every product converts it again. Here the copies are made once an optimizer step (`WeightCopies`), norms
compute in float32 inside, take bf16 and return it, and gradients of weights are float32: those of products as the
product adds them up, on a GPU, without a rounding to bf16 in between. Parameters stay float32 under their names, so
optimizers, checkpoints and exports see what they always saw.

Layers of the classes below are given a subclass that does so. Whatever else a model computes stays under autocast.

See docs/design/bf16-stream.md.

Letters in shapes: N positions, I inputs, O outputs, W columns of a padded head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from terakoya.toolkit.objectives.padded_head import can_be_padded, pad_rows

DTYPE = torch.bfloat16
COPIES = "bf16_copies"
"""The attribute of a layer in which its copies are, by the name of the parameter."""
PADDED_COPIES = "bf16_padded_copies"
"""The same of a vocabulary head with W rows, of which `COPIES` has the first O; the further rows stay 0."""


class WeightCopies:
    """The bf16 copies of the weights of a module whose layers read them.

    Attributes:
        weights: the float32 parameters that have a copy, each once.
        copies: their copies, in the same order.
    """

    def __init__(self, module: nn.Module) -> None:
        """Gives each layer of `module` that has a class for it that class, and its copies; on the module's device."""
        by_weight: dict[nn.Parameter, Tensor] = {}
        for model in module.modules():
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            if not isinstance(head, nn.Linear) or not can_be_padded(head) or head.weight in by_weight:
                continue
            own = dict(head.named_parameters(recurse=False))
            padded = {name: pad_rows(weight.detach(), DTYPE) for name, weight in own.items()}
            by_weight |= {weight: padded[name][: len(weight)] for name, weight in own.items()}
            setattr(head, PADDED_COPIES, padded)
        for layer in module.modules():
            streamed = _PaddedLinear if hasattr(layer, PADDED_COPIES) else _streamed_class(layer)
            if streamed is None:
                continue
            layer.__class__ = streamed
            if issubclass(streamed, nn.Embedding):
                continue
            copies = {
                name: by_weight.setdefault(weight, weight.detach().to(DTYPE))
                for name, weight in layer._parameters.items()
                if weight is not None
            }
            setattr(layer, COPIES, copies)
        self.weights: list[Tensor] = list(by_weight)
        self.copies = list(by_weight.values())

    def refresh(self) -> None:
        """Rounds the weights into their copies, after they were changed."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.weights)


class _Product(torch.autograd.Function):
    """A linear layer of bf16 copies whose gradients go to the float32 weights. It takes rows (N, I): of an input with
    more dimensions torch would return a view, which models may not change in place. Copies may have rows that the
    weights have not, in which gradients are cut off."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_copy: Tensor,
        bias_copy: Tensor | None,
        outputs_first: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight_copy)
        ctx.outputs_first, ctx.outputs = outputs_first, len(weight)
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
            of_weight = float_product(gradient.t(), rows) if ctx.outputs_first else float_product(rows.t(), gradient)
        if needs_bias:
            of_bias = gradient.sum(0, dtype=torch.float32)
        if ctx.outputs_first and len(weight) > ctx.outputs:
            for each in (of_weight, of_bias):
                if each is not None:  # in place: to a view autograd cannot add a tied embedding's gradient in place
                    each.resize_(ctx.outputs, *each.shape[1:])
        return of_rows, of_weight, of_bias, None, None, None


class _Rounded(torch.autograd.Function):
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


def _product(layer: nn.Module, states: Tensor, copies: Mapping[str, Tensor], *, outputs_first: bool) -> Tensor:
    """Returns the product of `states` (..., I) with `copies` of the weights of `layer`, (..., O) or (..., W)."""
    rows = states.to(DTYPE).reshape(-1, states.shape[-1])
    product: Tensor = _Product.apply(
        rows, layer.weight, layer.bias, copies["weight"], copies.get("bias"), outputs_first
    )
    return product.view(*states.shape[:-1], -1)


def _norm(function: Callable[..., Tensor], layer: nn.Module, states: Tensor, eps: float) -> Tensor:
    """Returns torch's norm `function` of `states` (..., H), computed in float32, in bf16."""
    copies = getattr(layer, COPIES)
    affine = [_Rounded.apply(layer.get_parameter(name), copy) for name, copy in copies.items()]
    shape = copies["weight"].shape
    with torch.autocast(states.device.type, enabled=False):  # it would return float32
        if states.device.type == "cuda":
            return function(states.to(DTYPE), shape, *affine, eps=eps)
        # a CPU's kernels for bf16 add up the gradients of weight and bias in bf16
        return function(states.float(), shape, *(each.float() for each in affine), eps=eps).to(DTYPE)


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return _product(self, input, getattr(self, COPIES), outputs_first=True)


class _PaddedLinear(_Linear):
    """A vocabulary head, with a forward for `padded_head`."""

    def padded_forward(self, input: Tensor) -> Tensor:
        return _product(self, input, getattr(self, PADDED_COPIES), outputs_first=True)


class _Conv1D(Conv1D):  # weights (I, O)
    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x, getattr(self, COPIES), outputs_first=False)


class _Embedding(nn.Embedding):
    """Reads float32 rows and rounds them: gradients of a frequent token are added up in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(DTYPE)


class _LayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return _norm(F.layer_norm, self, input, self.eps)


class _TanhGELU(NewGELUActivation):
    """The same function in one kernel; its power of 3 would be float32 under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class _NamedNorm(nn.Module):
    """A norm that Transformers writes out: by root mean square, or a layer norm where there is a bias."""

    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        function = F.rms_norm if self._parameters.get("bias") is None else F.layer_norm
        return _norm(function, self, hidden_states, self.variance_epsilon)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    nn.Embedding: _Embedding,
    nn.LayerNorm: _LayerNorm,
    Conv1D: _Conv1D,
    NewGELUActivation: _TanhGELU,
}
NAMED_NORMS: Sequence[tuple[str, str]] = (
    ("llama", "LlamaRMSNorm"),
    ("qwen3", "Qwen3RMSNorm"),
    ("t5", "T5LayerNorm"),
    ("deberta", "DebertaLayerNorm"),
)
"""Families and classes of the norms that Transformers writes out."""


def _streamed_class(layer: nn.Module) -> type[nn.Module] | None:
    """Returns the class for the stream of `layer`; None where it has none, as a subclass of one that has."""
    if isinstance(layer, nn.LayerNorm) and not layer.elementwise_affine:
        return None
    found = CLASSES.get(type(layer))
    if found is None and _is_named_norm(type(layer)):
        found = CLASSES[type(layer)] = cast(
            "type[nn.Module]", type(f"_{type(layer).__name__}", (_NamedNorm, type(layer)), {})
        )
    return found


def _is_named_norm(kind: type[nn.Module]) -> bool:
    """Whether `kind` is one of `NAMED_NORMS`, whose modules are only imported where a model has one."""
    return any(
        kind is getattr(sys.modules.get(f"transformers.models.{family}.modeling_{family}"), name, None)
        for family, name in NAMED_NORMS
    )

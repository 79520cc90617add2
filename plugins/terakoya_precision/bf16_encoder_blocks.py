"""Encoder blocks of the bf16 stream: queries, keys and values as one product, and residual sums without passes of their
own, forward and backward.

Each class below is mixed into a class of Transformers, whose modules, weights and names stay. See
docs/design/bf16-stream.md.

Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terakoya_precision.bf16_functions import DTYPE, Branch, Product, SumNorm, join
from terakoya_precision.fused.functions import FusedBranch, FusedGelu, FusedSumNorm
from terakoya_precision.fused.ops import LARGEST_WIDTH

COPIES = "bf16_copies"
"""The attribute of a layer in which its copies are, by the name of the parameter."""
JOINED_COPIES = "bf16_joined_copies"
"""The attribute of an attention: those of its queries, keys and values, one below the other. Where weights are gathered
it has none."""
IS_ONE = "bf16_is_one_product"
"""The attribute of an attention that is true where its queries, keys and values are one product."""
FUSED = "bf16_fused"
"""The attribute of a block's part that is true where it takes fused kernels."""
TOTAL = "bf16_total"
"""The attribute of a layer that is true where products add the gradient of its weight to that of the micro-step
before."""
GELUS: Mapping[type[nn.Module], str] = {GELUActivation: "none", NewGELUActivation: "tanh"}
"""torch's name of the approximation by class."""

ATTENTIONS = (("bert", "BertAttention"), ("roberta", "RobertaAttention"), ("electra", "ElectraAttention"))
LAYERS = (("bert", "BertLayer"), ("roberta", "RobertaLayer"), ("electra", "ElectraLayer"))
OUTPUTS = (
    ("bert", "BertSelfOutput"),
    ("bert", "BertOutput"),
    ("roberta", "RobertaSelfOutput"),
    ("roberta", "RobertaOutput"),
    ("electra", "ElectraSelfOutput"),
    ("electra", "ElectraOutput"),
    ("deberta", "DebertaSelfOutput"),
    ("deberta", "DebertaOutput"),
    ("deberta_v2", "DebertaV2SelfOutput"),
    ("deberta_v2", "DebertaV2Output"),
)
"""Families and classes of Transformers that the classes below are mixed into."""


class Attention(nn.Module):
    """Self-attention and the sum behind it. Without gradients, or with hooks, it is that of Transformers."""

    output: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **named: Any) -> Any:
        """Returns the normed sum (B, T, H) of `hidden_states` (B, T, H) and the attention to them, and what else the
        attention's function returns."""
        inner: Any = self.self
        further = {name: value for name, value in named.items() if value is not None}
        kind = inner.config._attn_implementation
        layers = projections(self)
        bypassed = (inner, *layers)
        is_taken = kind != "eager" and "past_key_values" not in further and need_gradients(hidden_states, *layers)
        if not is_taken or has_hooks(*bypassed):
            return super().forward(hidden_states, attention_mask, **named)
        function = FusedBranch if _is_fused(self) and can_join(layers) else Branch
        *products, residual = branch(function, layers, hidden_states, copies_of(self))
        heads = [each.unflatten(-1, (-1, inner.attention_head_size)).transpose(1, 2) for each in products]
        attended, weights = ALL_ATTENTION_FUNCTIONS[kind](
            inner, *heads, attention_mask, dropout=inner.dropout.p if inner.training else 0.0, scaling=inner.scaling,
            **further,
        )  # fmt: skip
        return self.output(attended.flatten(2), residual), weights


class Layer(nn.Module):
    """A block, of which this changes the feed-forward part."""

    intermediate: Any
    output: Any

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Returns the normed sum (B, T, H) of `attention_output` (B, T, H) and what the feed-forward makes of it."""
        first, activation = self.intermediate.dense, self.intermediate.intermediate_act_fn
        if not need_gradients(attention_output, first) or has_hooks(self.intermediate, first):
            states: Tensor = super().feed_forward_chunk(attention_output)  # type: ignore[misc]
            return states
        gelu = next((name for kind, name in GELUS.items() if isinstance(activation, kind)), None)
        fused, copies = _is_fused(self), [getattr(first, COPIES)]
        if fused and gelu is not None and not has_hooks(activation):
            middle, residual = branch(FusedBranch, (first,), attention_output, copies, biases_learn=False)
            middle = FusedGelu.apply(middle, first.bias, gelu)
        else:
            middle, residual = branch(FusedBranch if fused else Branch, (first,), attention_output, copies)
            middle = activation(middle)
        states = self.output(middle, residual)
        return states


class Output(nn.Module):
    """A linear layer, dropout, and the layer norm of the sum with the residual."""

    dense: Any
    dropout: Any
    LayerNorm: Any

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Returns the normed sum (B, T, H) of the residual `input_tensor` (B, T, H) and the layer's result."""
        norm = self.LayerNorm
        if has_hooks(norm, self.dropout):
            normed: Tensor = super().forward(hidden_states, input_tensor)
            return normed
        copies = getattr(norm, COPIES)
        eps = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
        further = copies["weight"], copies["bias"], eps, self.dropout.p if self.dropout.training else 0.0
        is_fused = _is_fused(self) and COPIES in self.dense.__dict__ and not has_hooks(self.dense)
        is_fused = is_fused and len(norm.weight) <= LARGEST_WIDTH
        states = _without_bias_gradient(self.dense, hidden_states) if is_fused else self.dense(hidden_states)
        given = states.to(DTYPE), input_tensor.to(DTYPE), norm.weight, norm.bias
        with torch.autocast(states.device.type, enabled=False):
            if is_fused:
                normed = FusedSumNorm.apply(*given, self.dense.bias, *further)
            else:
                normed = SumNorm.apply(*given, *further)
        return normed


def branch(
    function: type[Branch],
    layers: Sequence[nn.Linear],
    states: Tensor,
    copies: Sequence[Mapping[str, Tensor]],
    *,
    biases_learn: bool = True,
) -> tuple[Tensor, ...]:
    """Returns what `function` makes of `states`: the result of each of `layers`, and for a residual sum `states`.
    Without `biases_learn` the function that takes the result returns the gradient of the bias. `copies` are those of
    all layers, or of each."""
    read = [each["weight"] for each in copies]
    bias = join([each["bias"] for each in copies]) if "bias" in copies[0] else None
    parameters = (
        *(each.weight for each in layers), *(each.bias if biases_learn else None for each in layers),
        *map(total_of, layers),
    )  # fmt: skip
    branches: tuple[Tensor, ...] = function.apply(states.to(DTYPE), bias, len(layers), *parameters, *read)
    return branches


def _without_bias_gradient(layer: nn.Linear, states: Tensor) -> Tensor:
    """Returns the result (..., O) of `layer` for `states` (..., I); the bias gets no gradient from it."""
    copies = getattr(layer, COPIES)
    rows = states.to(DTYPE).reshape(-1, states.shape[-1])
    given = (layer.weight, None, copies["weight"], copies.get("bias"), True, total_of(layer))
    product: Tensor = Product.apply(rows, *given)
    return product.view(*states.shape[:-1], -1)


def total_of(layer: nn.Module) -> Tensor | None:
    """Returns what the gradient of the weight of `layer` is added to where it is computed; None where autograd adds."""
    return layer.get_parameter("weight").grad if getattr(layer, TOTAL, False) else None


def _is_fused(part: nn.Module) -> bool:
    """Whether `part` takes fused kernels."""
    return bool(getattr(part, FUSED, False))


def can_join(layers: Sequence[nn.Linear]) -> bool:
    """Whether `layers` are three of one width, all weights of which learn."""
    weights = [each.weight for each in layers] + [each.bias for each in layers if each.bias is not None]
    return (
        len(layers) == 3 and len({each.out_features for each in layers}) == 1 and all(w.requires_grad for w in weights)
    )


def need_gradients(states: Tensor, *layers: nn.Linear) -> bool:
    """Whether the results of `layers` for `states` need gradients. Where they do not, as in frozen blocks, torch's
    compiler may call the forward of a function of autograd without its context."""
    learns = states.requires_grad or any(each.requires_grad for layer in layers for each in layer.parameters())
    return torch.is_grad_enabled() and learns


def has_hooks(*modules: nn.Module) -> bool:
    """Whether any of `modules` has hooks, which its call runs."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in modules
    )


def projections(attention: Any) -> tuple[nn.Linear, ...]:
    """Returns the layers for queries, keys and values of `attention`; none where they are one layer."""
    if "self" in attention._modules:
        return attention.self.query, attention.self.key, attention.self.value
    return (attention.q_proj, attention.k_proj, attention.v_proj) if "q_proj" in attention._modules else ()


def copies_of(attention: nn.Module) -> Sequence[Mapping[str, Tensor]]:
    """Returns the copies of all projections of `attention`, or of each."""
    joined = getattr(attention, JOINED_COPIES, None)
    return [getattr(each, COPIES) for each in projections(attention)] if joined is None else [joined]


def can_branch(layers: Sequence[nn.Module], taken: Mapping[nn.Parameter, Tensor]) -> bool:
    """Whether `layers` can be one product: plain linear layers, and not adapters' or others', whose weights no other
    layer before them has. `taken` are the weights that have copies already."""
    own = [each for layer in layers for each in layer.parameters()]
    return (
        all(type(each) is nn.Linear and "forward" not in each.__dict__ for each in layers)
        and len({id(each) for each in own}) == len(own)
        and len({each.bias is None for each in layers}) == 1
        and not any(each in taken for each in own)
    )


def join_copies(attention: nn.Module, by_weight: MutableMapping[nn.Parameter, Tensor]) -> None:
    """Gives `attention` the copies of its three projections in one tensor, of which `by_weight` gets the parts."""
    layers, joined = projections(attention), {}
    for name in layers[0]._parameters:
        weights = [layer.get_parameter(name) for layer in layers if getattr(layer, name) is not None]
        if weights:
            joined[name] = torch.cat([weight.detach().to(DTYPE) for weight in weights])
            by_weight.update(zip(weights, joined[name].split([len(weight) for weight in weights]), strict=True))
    setattr(attention, JOINED_COPIES, joined)

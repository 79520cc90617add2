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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from terakoya.training.model.bf16_functions import DTYPE, Branch, SumNorm

COPIES = "bf16_copies"
"""The attribute of a layer in which its copies are, by the name of the parameter."""
JOINED_COPIES = "bf16_joined_copies"
"""The attribute of an attention: those of its queries, keys and values, one below the other."""

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
        bypassed = (inner, *projections(self))
        if not torch.is_grad_enabled() or kind == "eager" or "past_key_values" in further or _has_hooks(*bypassed):
            return super().forward(hidden_states, attention_mask, **named)
        *products, residual = _branch(projections(self), hidden_states, getattr(self, JOINED_COPIES))
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
        if not torch.is_grad_enabled() or _has_hooks(self.intermediate, self.intermediate.dense):
            states: Tensor = super().feed_forward_chunk(attention_output)  # type: ignore[misc]
            return states
        first = self.intermediate.dense
        middle, residual = _branch((first,), attention_output, getattr(first, COPIES))
        states = self.output(self.intermediate.intermediate_act_fn(middle), residual)
        return states


class Output(nn.Module):
    """A linear layer, dropout, and the layer norm of the sum with the residual."""

    dense: Any
    dropout: Any
    LayerNorm: Any

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Returns the normed sum (B, T, H) of the residual `input_tensor` (B, T, H) and the layer's result."""
        norm = self.LayerNorm
        if _has_hooks(norm, self.dropout):
            normed: Tensor = super().forward(hidden_states, input_tensor)
            return normed
        states = self.dense(hidden_states)
        copies = getattr(norm, COPIES)
        eps = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
        with torch.autocast(states.device.type, enabled=False):
            normed = SumNorm.apply(
                states.to(DTYPE), input_tensor.to(DTYPE), norm.weight, norm.bias, copies["weight"], copies["bias"], eps,
                self.dropout.p if self.dropout.training else 0.0,
            )  # fmt: skip
        return normed


def _branch(layers: Sequence[nn.Linear], states: Tensor, copies: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the result of each of `layers`, and `states` for the residual sum."""
    parameters = (*(each.weight for each in layers), *(each.bias for each in layers))
    branches: tuple[Tensor, ...] = Branch.apply(states.to(DTYPE), copies["weight"], copies.get("bias"), *parameters)
    return branches


def _has_hooks(*modules: nn.Module) -> bool:
    """Whether any of `modules` has hooks, which its call runs."""
    return any(
        each._forward_hooks or each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks
        for each in modules
    )


def projections(attention: Any) -> tuple[nn.Linear, ...]:
    """Returns the layers for queries, keys and values of `attention`."""
    return attention.self.query, attention.self.key, attention.self.value


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

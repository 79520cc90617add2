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
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from terakoya.toolkit.objectives.padded_head import can_be_padded, pad_rows
from terakoya_precision.bf16_decoder_blocks import (
    ATTENTIONS_WITH_WIDE_NORMS,
    MODERNBERT_ATTENTIONS,
    ROTARY_ATTENTIONS,
    ModernBertAttention,
    RotaryAttention,
    WideNormAttention,
)
from terakoya_precision.bf16_encoder_blocks import (
    ATTENTIONS,
    COPIES,
    FUSED,
    IS_ONE,
    LAYERS,
    OUTPUTS,
    TOTAL,
    Attention,
    Layer,
    Output,
    can_branch,
    can_join,
    join_copies,
    projections,
    total_of,
)
from terakoya_precision.bf16_functions import DTYPE, Product, Rounded, Rows, adds_float_products
from terakoya_precision.fused.ops import LARGEST_WIDTH
from terakoya_precision.gathered import take_gathered

PADDED_COPIES = "bf16_padded_copies"
"""The same of a vocabulary head with W rows, of which `COPIES` has the first O; the further rows stay 0. Empty where
weights are gathered."""

ROW_IDS = "bf16_row_ids"
"""The attribute of an embedding of few rows on a GPU: see `small_table_gradient`."""
FEW_ROWS = 512
"""Up to how many rows an embedding's gradient is a product: those of token types and of most encoders' positions. With
more rows than columns the matrix of the product would be larger than what it saves."""


class WeightCopies:
    """The bf16 copies of the weights of a module whose layers read them.

    Attributes:
        weights: the float32 parameters that layers read in bf16, each once.
        copies: their copies, in the same order; none where weights are gathered.
        gathers_on: the device on which an engine gathers weights in bf16, for each use; None where it has them all.
        compiled: whether blocks are.
        facts: as in `components.Copies`.
    """

    def __init__(
        self, module: nn.Module, *, fused: bool = False, gathers_on: torch.device | None = None, compiled: bool = False
    ) -> None:
        """Gives each layer of `module` that has a class for it that class, and its copies; on the module's device. With
        `fused` parts of blocks take the kernels of that folder."""
        self.facts = {"bf16_stream": True, "fused_kernels": fused}
        self.gathers_on, self.compiled = gathers_on, compiled
        by_weight: dict[nn.Parameter, Tensor] = {}
        for model in module.modules():
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            if not isinstance(head, nn.Linear) or not can_be_padded(head, gathers_on) or head.weight in by_weight:
                continue
            own = {} if gathers_on else dict(head.named_parameters(recurse=False))
            padded = {name: pad_rows(weight.detach(), DTYPE) for name, weight in own.items()}
            by_weight |= {weight: padded[name][: len(weight)] for name, weight in own.items()}
            setattr(head, PADDED_COPIES, padded)
        for layer in module.modules():
            streamed = _PaddedLinear if hasattr(layer, PADDED_COPIES) else _streamed_class(layer)
            if streamed is None or not _can_be(streamed, layer, by_weight):
                continue
            layer.__class__ = streamed
            if issubclass(streamed, (Attention, RotaryAttention)) and can_branch(projections(layer), by_weight):
                setattr(layer, IS_ONE, True)
                if not gathers_on:
                    join_copies(layer, by_weight)
            copies = {
                name: by_weight.setdefault(weight, weight if gathers_on else weight.detach().to(DTYPE))
                for name, weight in layer._parameters.items()
                if weight is not None
            }
            setattr(layer, COPIES, {} if gathers_on else copies)
            if isinstance(layer, nn.Embedding) and layer.num_embeddings <= min(FEW_ROWS, layer.embedding_dim):
                device = gathers_on or layer.weight.device
                setattr(layer, ROW_IDS, _row_ids(layer, device) if device.type == "cuda" else None)
            setattr(layer, FUSED, fused)
        self.weights: list[Tensor] = list(by_weight)
        self.copies = [] if gathers_on else list(by_weight.values())

    def refresh(self) -> None:
        """Rounds the weights into their copies, after they were changed."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.weights)

    def follow(self, group: nn.Module, *, is_block: bool) -> None:
        """See `components.Copies`."""
        assert self.gathers_on is not None
        group.register_forward_pre_hook(take_gathered(self.gathers_on, compiled=self.compiled and is_block))

    def add_in_products(self, module: nn.Module) -> list[nn.Parameter]:
        """Has the products of the blocks of `module` add to gradients that are there; returns their weights, none where
        the device cannot. A head's gradients may be asked for by themselves (`head_in_parts`), and where queries, keys
        and values are one product that of their weights is one tensor."""
        if not self.copies or not adds_float_products(self.copies[0].device):
            return []
        found: dict[nn.Parameter, None] = {}
        blocks = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
        inside = {part: None for each in blocks for part in each.modules()}
        joined = {
            layer
            for part in inside
            if isinstance(part, Attention) and getattr(part, FUSED) and can_join(projections(part))
            for layer in projections(part)
        }
        for layer in inside:
            if isinstance(layer, (_Linear, _Conv1D)) and layer.weight.requires_grad and layer not in joined:
                setattr(layer, TOTAL, True)
                found[cast("nn.Parameter", layer.weight)] = None
        return list(found)


def _row_ids(layer: nn.Embedding, device: torch.device) -> Tensor:
    """Returns the id of each row of `layer` (R,), -1 for that of padding."""
    ids = torch.arange(layer.num_embeddings, device=device)
    return ids if layer.padding_idx is None else ids.masked_fill_(ids == layer.padding_idx, -1)


def fused_widths(module: nn.Module) -> list[int]:
    """Returns the widths of those parts of `module` that take fused kernels in the stream, each once, sorted."""
    parts = [each for each in module.modules() if issubclass(_streamed_class(each) or object, Output)]
    widths = {len(each.get_submodule("LayerNorm").get_parameter("weight")) for each in parts}
    return sorted(each for each in widths if each <= LARGEST_WIDTH)


def _product(layer: nn.Module, states: Tensor, copies: Mapping[str, Tensor], *, outputs_first: bool) -> Tensor:
    """Returns the product of `states` (..., I) with `copies` of the weights of `layer`, (..., O) or (..., W)."""
    rows = states.to(DTYPE).reshape(-1, states.shape[-1])
    given = (layer.weight, layer.bias, copies["weight"], copies.get("bias"), outputs_first, total_of(layer))
    product: Tensor = Product.apply(rows, *given)
    return product.view(*states.shape[:-1], -1)


def _norm(
    function: Callable[..., Tensor], layer: nn.Module, states: Tensor, eps: float, *, added: float = 0.0
) -> Tensor:
    """Returns torch's norm `function` of `states` (..., H), computed in float32, in bf16. `added` is added to the
    weight."""
    copies = getattr(layer, COPIES)
    affine = [Rounded.apply(getattr(layer, name), copy) for name, copy in copies.items()]
    affine = [each + added for each in affine] if added else affine
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
        padded = getattr(self, PADDED_COPIES)
        padded = padded or {name: pad_rows(each, DTYPE) for name, each in getattr(self, COPIES).items()}
        return _product(self, input, padded, outputs_first=True)


class _Conv1D(Conv1D):  # weights (I, O)
    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x, getattr(self, COPIES), outputs_first=False)


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        weight_copy, row_ids = getattr(self, COPIES)["weight"], getattr(self, ROW_IDS, None)
        rows: Tensor = Rows.apply(input, self.weight, weight_copy, self.padding_idx, row_ids)
        return rows


class _LayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return _norm(F.layer_norm, self, input, self.eps)


class _TanhGELU(NewGELUActivation):
    """The same function in one kernel; its power of 3 would be float32 under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class _ScaledEmbedding(nn.Module):
    """An embedding whose rows are multiplied by a number."""

    scalar_embed_scale: float

    def forward(self, input_ids: Tensor) -> Tensor:
        layer: Any = self
        return _Embedding.forward(layer, input_ids) * self.scalar_embed_scale


class _NamedNorm(nn.Module):
    """A norm that Transformers writes out: by root mean square, or a layer norm where there is a bias."""

    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        function = F.rms_norm if self._parameters.get("bias") is None else F.layer_norm
        return _norm(function, self, hidden_states, self.variance_epsilon)


class _NormFromZero(nn.Module):
    """A norm by root mean square whose weight is the distance from 1."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return _norm(F.rms_norm, self, x, self.eps, added=1.0)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    nn.Embedding: _Embedding,
    nn.LayerNorm: _LayerNorm,
    Conv1D: _Conv1D,
    NewGELUActivation: _TanhGELU,
}
NAMED_NORMS = (
    ("llama", "LlamaRMSNorm"),
    ("qwen3", "Qwen3RMSNorm"),
    ("mistral", "MistralRMSNorm"),
    ("olmo2", "Olmo2RMSNorm"),
    ("eurobert", "EuroBertRMSNorm"),
    ("t5", "T5LayerNorm"),
    ("deberta", "DebertaLayerNorm"),
)
"""Families and classes of the norms that Transformers writes out."""
NORMS_FROM_ZERO = (("gemma3", "Gemma3RMSNorm"),)
SCALED_EMBEDDINGS = (("gemma3", "Gemma3TextScaledWordEmbedding"),)
NAMED: Mapping[type[nn.Module], Sequence[tuple[str, str]]] = {
    _NamedNorm: NAMED_NORMS,
    _NormFromZero: NORMS_FROM_ZERO,
    _ScaledEmbedding: SCALED_EMBEDDINGS,
    RotaryAttention: ROTARY_ATTENTIONS,
    WideNormAttention: ATTENTIONS_WITH_WIDE_NORMS,
    ModernBertAttention: MODERNBERT_ATTENTIONS,
    Attention: ATTENTIONS,
    Layer: LAYERS,
    Output: OUTPUTS,
}
"""What is mixed into classes of Transformers, which are only imported where a model has one."""


def _streamed_class(layer: nn.Module) -> type[nn.Module] | None:
    """Returns the class for the stream of `layer`; None where it has none, as a subclass of one that has."""
    if isinstance(layer, nn.LayerNorm) and not layer.elementwise_affine:
        return None
    kind = type(layer)
    found = CLASSES.get(kind)
    for own, names in NAMED.items() if found is None else ():
        if any(
            kind is getattr(sys.modules.get(f"transformers.models.{i}.modeling_{i}"), name, None) for i, name in names
        ):
            found = CLASSES[kind] = cast("type[nn.Module]", type(f"_{kind.__name__}", (own, kind), {}))
    return found


def _can_be(streamed: type[nn.Module], layer: Any, taken: Mapping[nn.Parameter, Tensor]) -> bool:
    """Whether the parts and the settings of `layer` are those that the class `streamed` needs."""
    if issubclass(streamed, Attention):
        return not layer.is_cross_attention and can_branch(projections(layer), taken)
    if issubclass(streamed, Layer):
        return can_branch((layer.intermediate.dense,), {})
    if issubclass(streamed, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return not issubclass(streamed, Output) or _streamed_class(layer.LayerNorm) is not None

"""Causal models of Transformers: a body that ends with its norm, and a linear vocabulary head.

torch is imported inside functions, so that listing architectures stays quick.
Letters in shapes: B rows, T positions, H hidden size, L layers, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from terakoya.components import DocumentMasking, Head, TensorPartition, Vocabulary
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture, nearest_divisors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class DecoderArchitecture(TransformersArchitecture):
    """The base of causal families. A family adds its fields, `config_class` and `model_classes`.

    With `document_masking = "mask_4d"` the body receives a mask (B, 1, T, T) that it adds to its attention scores, as
    GPT-J's does. The field `scaled_init`, if a family has it, applies to `output_layers`.
    """

    if TYPE_CHECKING:  # fields that each family declares, with its own defaults
        hidden_size: int
        num_hidden_layers: int
        num_attention_heads: int

    document_masking: ClassVar[DocumentMasking] = "attention_interface"
    block_list: ClassVar[str] = "layers"
    """The body's attribute that holds the layers."""
    final_norm: ClassVar[str] = "norm"
    """The body's attribute that holds the norm after the last layer."""
    position_embedding: ClassVar[str | None] = None
    """The body's attribute that embeds positions, if it has one."""
    whole_embedding: ClassVar[str | None] = None
    """The body's attribute that embeds tokens and does more with them, such as a norm, if it has one: later stages of a
    pipeline do without all of it."""
    embedding_dropout_layer: ClassVar[str | None] = None
    """The body's attribute with the dropout of embeddings, if it has one."""
    scales_output_layers: ClassVar[bool] = False
    """Whether Transformers initialises `output_layers` smaller by sqrt(2 L) already."""
    fuses_gelu: ClassVar[bool] = False
    """Whether `build` lets one kernel compute each "gelu_new"."""

    @model_validator(mode="after")
    def _rotary_dim_fits(self) -> Self:
        """A field `rotary_dim`, if a family has it, is the number of dimensions of a head with rotary positions."""
        rotary_dim, head_size = getattr(self, "rotary_dim", None), self.hidden_size // self.num_attention_heads
        if rotary_dim is not None and (rotary_dim % 2 or rotary_dim > head_size):
            raise ValueError(
                f"rotary_dim: expected an even number of at most {head_size}, the size of a head, got {rotary_dim}"
            )
        return self

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the special ids.

        A padding id that also ends documents is left out: models keep the embedding of the padding id at zero.
        """
        pad = None if vocabulary.pad == vocabulary.end else vocabulary.pad
        ids = {"pad_token_id": pad, "bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.end}
        arguments = super().config_arguments(vocabulary) | ids
        arguments.pop("scaled_init", None)
        return arguments

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model, with its output layers scaled if `scaled_init`. A padding id that also
        ends documents is learnt like any other."""
        model = super().build(vocabulary, head)
        words: Any = model.get_input_embeddings()
        if vocabulary.end is not None and getattr(words, "padding_idx", None) == vocabulary.end:
            words.padding_idx = None
        scaled_init = getattr(self, "scaled_init", self.scales_output_layers)
        if scaled_init != self.scales_output_layers:
            scale_output_layers(model, *self.output_layers, layers=self.num_hidden_layers, down=scaled_init)
        if self.fuses_gelu:
            fuse_gelu(model)
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the body's last hidden states (B, T, H), after its final norm: a position sees its own document up to
        itself.

        The embeddings are computed here: some bodies search ids for padding, which waits for the device. If `batch` has
        `inputs_embeds` (B, T, H), these are used.
        """
        from terakoya.toolkit.architectures import attention

        body = model.base_model
        if self.document_masking == "mask_4d":
            arguments = {"attention_mask": attention.additive(attention.causal_mask(batch["document_ids"]))}
        else:
            arguments = attention.causal_arguments(model, batch)
        embeddings = (
            batch["inputs_embeds"] if "inputs_embeds" in batch else body.get_input_embeddings()(batch["input_ids"])
        )
        return body(
            inputs_embeds=embeddings, position_ids=batch["position_ids"], use_cache=False, **arguments
        ).last_hidden_state

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        return model.lm_head(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """Returns the layers."""
        return list(getattr(model.base_model, self.block_list))

    def keep_stage_blocks(self, model: PreTrainedModel, stage: range) -> None:
        from torch.nn import Identity

        body = model.base_model
        blocks = getattr(body, self.block_list)
        setattr(body, self.block_list, blocks[stage.start : stage.stop])
        if getattr(model.config, "layer_types", None):  # the body looks up the kind of its n-th layer
            model.config.layer_types = model.config.layer_types[stage.start : stage.stop]
        if stage.start > 0:
            if self.whole_embedding is not None:
                setattr(body, self.whole_embedding, _given_embeddings())
            body.set_input_embeddings(Identity())
            if self.position_embedding is not None:
                setattr(body, self.position_embedding, _no_positions())
            if self.embedding_dropout_layer is not None:
                setattr(body, self.embedding_dropout_layer, Identity())
        if stage.stop < len(blocks):
            setattr(body, self.final_norm, Identity())
            model.set_output_embeddings(Identity())


class GatedDecoderArchitecture(DecoderArchitecture):
    """The base of families in Llama's shape: rotary positions, RMS norms, heads that may share keys and values, a gated
    feed-forward. A family adds defaults for its sizes, the fields that only it has, such as `head_dim`, and other
    defaults where its own are not Llama's."""

    hidden_size: shared.HiddenSize
    intermediate_size: shared.IntermediateSize
    num_hidden_layers: shared.NumHiddenLayers
    num_attention_heads: shared.NumAttentionHeads
    num_key_value_heads: shared.NumKeyValueHeads = None
    max_position_embeddings: shared.MaxPositionEmbeddings
    rope_theta: shared.RopeTheta = 10_000.0
    rope_scaling: shared.RopeScalingOrNone = None
    initializer_range: shared.InitializerRange = 0.02
    rms_norm_eps: shared.NormEps = 1e-6
    attention_dropout: shared.AttentionDropout = 0.0
    tie_word_embeddings: shared.TieWordEmbeddings = False
    scaled_init: shared.ScaledInit = False

    output_layers = ("o_proj", "down_proj")
    per_head_modules: ClassVar[Sequence[str]] = ()
    """Modules of a layer that apply to each head separately, such as norms of queries: every process has them whole."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads, head_dim = self.num_attention_heads, getattr(self, "head_dim", None)
        if head_dim is None and self.hidden_size % (2 * heads):
            near = nearest_divisors(self.hidden_size // 2, heads) if self.hidden_size % 2 == 0 else ""
            raise ValueError(
                f"num_attention_heads: expected heads of an even size, which rotary positions need, got {heads} over "
                f"hidden_size {self.hidden_size}{near or '; use an even hidden_size'}"
            )
        shared = self.num_key_value_heads or heads
        if heads % shared:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads {heads}, got {shared}"
                f"{nearest_divisors(heads, shared)}"
            )
        if head_dim is not None and head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, which rotary positions need, got {head_dim}")
        return self

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the special ids; `rope_theta` and `rope_scaling` become
        `rope_parameters`, and no `num_key_value_heads` one for each head, as not all config classes read null."""
        arguments = super().config_arguments(vocabulary)
        arguments["num_key_value_heads"] = self.num_key_value_heads or self.num_attention_heads
        theta, scaling = arguments.pop("rope_theta"), self.rope_scaling
        arguments.pop("rope_scaling")
        default = {"rope_type": "default", "rope_theta": theta}
        arguments["rope_parameters"] = scaling.rope_parameters(theta) if scaling else default
        return arguments

    def tensor_partition(self) -> TensorPartition | None:
        """Divides heads, those of keys and values with the queries that share them, and the middle of the
        feed-forward."""
        return TensorPartition(
            sizes={
                "num_attention_heads": self.num_attention_heads,
                "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
                "intermediate_size": self.intermediate_size,
            },
            inputs=("self_attn", "mlp"),
            column_parallel={
                **{f"self_attn.{name}_proj": 1 for name in ("q", "k", "v")},
                **{f"mlp.{name}_proj": 1 for name in ("gate", "up")},
            },
            row_parallel=("self_attn.o_proj", "mlp.down_proj"),
            local=self.per_head_modules,
        )


def _given_embeddings() -> torch.nn.Module:
    """Returns a module in the place of a model's embeddings that takes hidden states as they are."""
    import torch

    class GivenEmbeddings(torch.nn.Module):
        """Returns `inputs_embeds` (B, T, H)."""

        def forward(self, input_ids: None, inputs_embeds: torch.Tensor) -> torch.Tensor:
            return inputs_embeds

    return GivenEmbeddings()


def _no_positions() -> torch.nn.Module:
    """Returns a module that replaces an embedding of positions, and adds nothing."""
    import torch

    class NoPositions(torch.nn.Module):
        """Returns zero, () float32, whatever the positions (B, T)."""

        def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros((), device=position_ids.device)

    return NoPositions()


def scale_output_layers(model: PreTrainedModel, *names: str, layers: int, down: bool = True) -> None:
    """Divides the weights with a name that ends in one of `names` by sqrt(2 L); multiplies instead if not `down`.

    These layers add to the residual stream, 2 in each of L = `layers` blocks. With a standard deviation that is smaller
    by this factor, the stream does not grow with depth (GPT-2, Radford et al., 2019; Megatron-LM).
    """
    import torch

    factor = math.sqrt(2 * layers)
    found = [
        weight for name, weight in model.named_parameters() if name.endswith(tuple(f".{each}.weight" for each in names))
    ]
    assert len(found) == 2 * layers, f"expected {2 * layers} output layers, found {len(found)}"
    with torch.no_grad():
        for weight in found:
            weight.mul_(1 / factor if down else factor)


def fuse_gelu(model: PreTrainedModel) -> None:
    """Replaces each "gelu_new" in `model`, which Transformers computes in eight operations, by one kernel.

    The formula is the same and only the rounding differs; it takes half the time and no intermediate arrays. The config
    is unchanged, so a saved model is a plain Transformers model.
    """
    import torch
    from transformers.activations import NewGELUActivation

    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, torch.nn.GELU(approximate="tanh"))

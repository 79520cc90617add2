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
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class DecoderArchitecture(TransformersArchitecture):
    """The base of causal families. A family adds its fields, `config_class` and `model_classes`.

    With `document_masking = "mask_4d"` the body receives a mask (B, 1, T, T) that it adds to its attention scores, as
    GPT-J's does. A family with the field `scaled_init` says in `output_layers` which layers that is about.
    """

    if TYPE_CHECKING:  # fields that each family declares, with its own defaults
        hidden_size: int
        num_hidden_layers: int
        num_attention_heads: int

    document_masking: ClassVar[DocumentMasking] = "attention_interface"
    block_list: ClassVar[str] = "layers"
    """The body's attribute that holds the layers."""
    final_norm: ClassVar[str] = "norm"
    """The body's attribute that holds the norm behind the last layer."""
    position_embedding: ClassVar[str | None] = None
    """The body's attribute that embeds positions, if it has one."""
    embedding_dropout: ClassVar[str | None] = None
    """The body's attribute that drops out embeddings, if it has one."""
    output_layers: ClassVar[Sequence[str]] = ()
    """The names, within a layer, of the modules that add to the residual stream: two in each."""
    scales_output_layers: ClassVar[bool] = False
    """Whether Transformers initialises `output_layers` smaller by sqrt(2 L) already."""
    fuses_gelu: ClassVar[bool] = False
    """Whether `build` lets one kernel compute each "gelu_new"."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} over {self.num_attention_heads} heads is no whole number")
        return self

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """The fields, the vocabulary's size and the special ids.

        A padding id that ends documents too is left out: models keep the embedding of the padding id at zero.
        """
        pad = None if vocabulary.pad == vocabulary.end else vocabulary.pad
        ids = {"pad_token_id": pad, "bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.end}
        arguments = super().config_arguments(vocabulary) | ids
        arguments.pop("scaled_init", None)
        return arguments

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """A freshly initialised model, its output layers as the field `scaled_init` says."""
        model = super().build(vocabulary, head)
        scaled_init = getattr(self, "scaled_init", self.scales_output_layers)
        if scaled_init != self.scales_output_layers:
            scale_output_layers(model, *self.output_layers, layers=self.num_hidden_layers, down=scaled_init)
        if self.fuses_gelu:
            fuse_gelu(model)
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The body's last hidden states (B, T, H), its final norm included: a position sees its own document up to
        itself.

        Words are looked up here: given ids, some bodies would search them for padding, and wait for the device. Where
        `batch` holds `inputs_embeds` (B, T, H), these are used.
        """
        from terakoya.toolkit.architectures import attention

        body = model.base_model
        if self.document_masking == "mask_4d":
            arguments = {"attention_mask": attention.additive(attention.causal_mask(batch["document_ids"]))}
        else:
            arguments = attention.causal_arguments(model, batch)
        words = batch["inputs_embeds"] if "inputs_embeds" in batch else body.get_input_embeddings()(batch["input_ids"])
        return body(
            inputs_embeds=words, position_ids=batch["position_ids"], use_cache=False, **arguments
        ).last_hidden_state

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.lm_head(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The layers."""
        return list(getattr(model.base_model, self.block_list))

    def keep_stage_blocks(self, model: PreTrainedModel, stage: range) -> None:
        """See `Architecture.keep_stage_blocks`."""
        from torch.nn import Identity

        body = model.base_model
        blocks = getattr(body, self.block_list)
        setattr(body, self.block_list, blocks[stage.start : stage.stop])
        if stage.start > 0:
            body.set_input_embeddings(Identity())
            if self.position_embedding is not None:
                setattr(body, self.position_embedding, _no_positions())
            if self.embedding_dropout is not None:
                setattr(body, self.embedding_dropout, Identity())
        if stage.stop < len(blocks):
            setattr(body, self.final_norm, Identity())
            model.set_output_embeddings(Identity())


class GatedDecoderArchitecture(DecoderArchitecture):
    """The base of families in Llama's shape: rotary positions, heads that may share keys and values, a gated
    feed-forward. A family that has them declares the fields `head_dim` and `rope_theta`."""

    if TYPE_CHECKING:  # fields that each family declares, with its own defaults
        num_key_value_heads: int | None
        intermediate_size: int

    output_layers = ("o_proj", "down_proj")
    per_head_modules: ClassVar[Sequence[str]] = ()
    """Modules of a layer that apply to each head alone, such as norms of queries: every process has them whole."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads, head_dim = self.num_attention_heads, getattr(self, "head_dim", None)
        if head_dim is None and self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} over {heads} heads is no even number, which rotary positions need"
            )
        shared = self.num_key_value_heads or heads
        if heads % shared:
            raise ValueError(f"{heads} heads cannot share {shared} num_key_value_heads evenly")
        if head_dim is not None and head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, which rotary positions need, got {head_dim}")
        return self

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """The fields, the vocabulary's size and the special ids; `rope_theta` as Transformers' `rope_parameters`."""
        arguments = super().config_arguments(vocabulary)
        if "rope_theta" in arguments:
            arguments["rope_parameters"] = {"rope_type": "default", "rope_theta": arguments.pop("rope_theta")}
        return arguments

    def tensor_partition(self) -> TensorPartition | None:
        """Heads, those of keys and values with the queries that share them, and the middle of the feed-forward."""
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


def _no_positions() -> torch.nn.Module:
    """A module that replaces an embedding of positions, and adds nothing."""
    import torch

    class NoPositions(torch.nn.Module):
        """Returns zero, () float32, whatever the positions (B, T)."""

        def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros((), device=position_ids.device)

    return NoPositions()


def scale_output_layers(model: PreTrainedModel, *names: str, layers: int, down: bool = True) -> None:
    """Divides the weights with a name that ends in one of `names` by sqrt(2 L); multiplies instead if not `down`.

    These are the layers that add to the residual stream, 2 of each of L = `layers` blocks: drawn with a standard
    deviation that is smaller by that, the stream does not grow with depth (GPT-2, Radford et al., 2019; Megatron-LM).
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
    """Lets one kernel compute each "gelu_new" in `model`, which Transformers writes out in eight operations.

    The same formula, other only in its rounding: half the time and none of the arrays in between. The config stays as
    it is, so a saved model is Transformers' own.
    """
    import torch
    from transformers.activations import NewGELUActivation

    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(part, name, torch.nn.GELU(approximate="tanh"))

"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): Llama's block with a size of head of its own and norms on queries and
keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Head, TensorPartition
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, Qwen3Config


class Qwen3(Architecture):
    """Fields bear the names of Transformers' `Qwen3Config`; defaults are Qwen3-0.6B's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"causal"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"
    trial: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2, "head_dim": 8}

    hidden_size: PositiveInt = 1024
    intermediate_size: PositiveInt = 3072
    num_hidden_layers: PositiveInt = 28
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt | None = 8
    """Heads of keys and values, each shared by as many neighbouring ones of queries; null is one for each."""
    head_dim: PositiveInt = 128
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt = 32_768
    initializer_range: NonNegativeFloat = 0.02
    rms_norm_eps: NonNegativeFloat = 1e-6
    rope_theta: PositiveFloat = 1_000_000.0
    attention_bias: bool = False
    attention_dropout: NonNegativeFloat = 0.0
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    """Whether the layers from `max_window_layers` on see the last `sliding_window` places only."""
    sliding_window: PositiveInt = 4096
    max_window_layers: NonNegativeInt = 28
    scaled_init: bool = False
    """Whether output layers begin smaller by sqrt(2 x layers), as Megatron-LM's do."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        shared = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % shared:
            raise ValueError(f"{self.num_attention_heads} heads cannot share {shared} num_key_value_heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, which rotary positions need, got {self.head_dim}")
        return self

    def config(self, vocabulary: Vocabulary) -> Qwen3Config:
        """The `Qwen3Config`, its special ids and vocabulary size from `vocabulary`."""
        from transformers import Qwen3Config

        from terakoya.toolkit.architectures.decoder_models import special_ids

        return Qwen3Config(
            **self.model_dump(exclude={"scaled_init", "rope_theta"}),
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            vocab_size=vocabulary.size,
            **special_ids(vocabulary),
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`Qwen3ForCausalLM`."""
        from transformers import Qwen3ForCausalLM

        from terakoya.toolkit.architectures.decoder_models import scale_output_layers

        model = Qwen3ForCausalLM(self.config(vocabulary))
        if self.scaled_init:
            scale_output_layers(model, "o_proj", "down_proj", layers=self.num_hidden_layers)
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); a position sees its own document up to itself."""
        from terakoya.toolkit.architectures import decoder_models

        return decoder_models.hidden(model, batch)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.lm_head(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The layers."""
        return list(model.base_model.layers)

    def tensor_partition(self) -> TensorPartition:
        """Heads, those of keys and values with the queries that share them, and the middle of the feed-forward. The
        norms of queries and keys are every head's."""
        from terakoya.toolkit.architectures import decoder_models

        return decoder_models.gated_partition(
            self.num_attention_heads, self.num_key_value_heads, self.intermediate_size,
            on_parts=("self_attn.q_norm", "self_attn.k_norm"),
        )  # fmt: skip

    def cut(self, model: PreTrainedModel, kept: range) -> None:
        """See `decoder_models.keep_blocks`."""
        from terakoya.toolkit.architectures import decoder_models

        decoder_models.keep_blocks(model, kept, blocks="layers", norm="norm", before={})

    def max_sequence_length(self) -> int:
        """What its rotary positions are made for."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `qwen3`."""
    return {"qwen3": Qwen3}

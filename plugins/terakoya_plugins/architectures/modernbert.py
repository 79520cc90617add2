"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): rotary positions, gated feed-forward, mostly local attention.

Every `global_attn_every_n_layers`-th layer sees its whole document, the others `local_attention` places around.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import ModernBertConfig, PreTrainedModel


class ModernBert(Architecture):
    """Fields bear the names of Transformers' `ModernBertConfig`; defaults are ModernBERT-base's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"masked", "body"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"
    trial: ClassVar[Mapping[str, Any]] = {"local_attention": 8}

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 22
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 1152
    hidden_activation: str = "gelu"
    max_position_embeddings: PositiveInt = 8192
    initializer_range: NonNegativeFloat = 0.02
    initializer_cutoff_factor: PositiveFloat = 2.0
    norm_eps: NonNegativeFloat = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    attention_dropout: NonNegativeFloat = 0.0
    embedding_dropout: NonNegativeFloat = 0.0
    mlp_bias: bool = False
    mlp_dropout: NonNegativeFloat = 0.0
    decoder_bias: bool = True
    local_attention: PositiveInt = 128
    """Places that a local layer sees, half of them on each side."""
    global_attn_every_n_layers: PositiveInt = 3
    global_rope_theta: PositiveFloat = 160_000.0
    local_rope_theta: PositiveFloat = 10_000.0

    def config(self, vocabulary: Vocabulary) -> ModernBertConfig:
        """The `ModernBertConfig`, its special ids and vocabulary size from `vocabulary`."""
        from transformers import ModernBertConfig

        return ModernBertConfig(
            **self.model_dump(),
            vocab_size=vocabulary.size,
            pad_token_id=vocabulary.pad,
            bos_token_id=vocabulary.cls,
            cls_token_id=vocabulary.cls,
            eos_token_id=vocabulary.sep,
            sep_token_id=vocabulary.sep,
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`ModernBertForMaskedLM` or `ModernBertModel`."""
        from transformers import ModernBertForMaskedLM, ModernBertModel

        models: Mapping[str, type[PreTrainedModel]] = {"masked": ModernBertForMaskedLM, "body": ModernBertModel}
        return models[head](self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); documents in one row never see each other."""
        from terakoya.toolkit.architectures import attention

        return model.base_model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], **attention.arguments(model, batch)
        ).last_hidden_state

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.decoder(model.head(hidden))

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The encoder's layers."""
        return list(model.base_model.layers)

    def max_sequence_length(self) -> int:
        """What its rotary positions are made for."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `modernbert`."""
    return {"modernbert": ModernBert}

"""ELECTRA (Clark et al., 2020, arXiv:2003.10555): narrower embeddings than BERT, and a head for replaced tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import encoder_models

if TYPE_CHECKING:
    import torch
    from transformers import ElectraConfig, PreTrainedModel


class Electra(Architecture):
    """Fields bear the names and defaults of Transformers' `ElectraConfig`: ELECTRA-small."""

    heads: ClassVar[frozenset[Head]] = frozenset({"masked", "discriminator", "body"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"

    embedding_size: PositiveInt = 128
    hidden_size: PositiveInt = 256
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 4
    intermediate_size: PositiveInt = 1024
    hidden_act: str = "gelu"
    hidden_dropout_prob: NonNegativeFloat = 0.1
    attention_probs_dropout_prob: NonNegativeFloat = 0.1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: PositiveInt = 2
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_eps: NonNegativeFloat = 1e-12

    def config(self, vocabulary: Vocabulary) -> ElectraConfig:
        """The `ElectraConfig`, its padding id and vocabulary size from `vocabulary`."""
        from transformers import ElectraConfig

        return ElectraConfig(**self.model_dump(), vocab_size=vocabulary.size, pad_token_id=vocabulary.pad)

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`ElectraForMaskedLM` (a generator), `ElectraForPreTraining` (a discriminator) or `ElectraModel`."""
        from transformers import ElectraForMaskedLM, ElectraForPreTraining, ElectraModel

        models: Mapping[str, type[PreTrainedModel]] = {
            "masked": ElectraForMaskedLM, "discriminator": ElectraForPreTraining, "body": ElectraModel
        }  # fmt: skip
        return models[head](self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); documents in one row never see each other."""
        return encoder_models.hidden(model, batch)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.generator_lm_head(model.generator_predictions(hidden))

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (B, T) that a token was replaced, of `hidden` (B, T, H)."""
        return model.discriminator_predictions(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The encoder's layers."""
        return encoder_models.blocks(model)

    def max_sequence_length(self) -> int:
        """One position embedding for each position."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `electra`."""
    return {"electra": Electra}

"""ELECTRA (Clark et al., 2020, arXiv:2003.10555): narrower embeddings than BERT, and a head for replaced tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.encoder import EncoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Electra(EncoderArchitecture):
    """Fields have the names and defaults of Transformers' `ElectraConfig`: ELECTRA-small."""

    config_class = "ElectraConfig"
    model_classes: ClassVar = {
        "masked": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining", "body": "ElectraModel"
    }  # fmt: skip
    vocabulary_head = ("generator_predictions", "generator_lm_head")

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

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, T) that a token was replaced, of `hidden` (B, T, H)."""
        return model.discriminator_predictions(hidden)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `electra`."""
    return {"electra": Electra}

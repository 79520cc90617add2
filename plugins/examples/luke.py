"""LUKE (Yamada et al., 2020, arXiv:2010.01057). Only its words are trained, because a token store has no entities.

Its attention does not go through Transformers' AttentionInterface, but it takes a mask for each pair of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head, Vocabulary
from terakoya.toolkit.architectures.encoder import EncoderArchitecture, first_position

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Luke(EncoderArchitecture):
    """Fields have the names and defaults of Transformers' `LukeConfig`."""

    config_class = "LukeConfig"
    model_classes: ClassVar = {"masked": "LukeForMaskedLM"}
    vocabulary_head = ("lm_head",)
    document_masking = "mask_4d"
    positions_follow_padding = True

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_dropout_prob: NonNegativeFloat = 0.1
    """The share of hidden values that dropout sets to zero."""
    attention_probs_dropout_prob: NonNegativeFloat = 0.1
    """The share of attention weights that dropout sets to zero."""
    max_position_embeddings: PositiveInt = 512
    """The longest row. The config's number is larger by padding id + 1, where positions start, as in RoBERTa."""
    entity_vocab_size: PositiveInt = 2
    """Number of entities, which are not trained here. Raise it later, and fine-tune them."""
    entity_emb_size: PositiveInt = 256
    """Width of an entity's embedding."""

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the usual arguments, without the attention queries that only entities use."""
        return {**super().config_arguments(vocabulary), "use_entity_aware_attention": False}

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns `LukeForMaskedLM`. Weights that words do not use are frozen: processes wait for every trainable
        weight's gradient."""
        model = super().build(vocabulary, head)
        for unused in (model.luke.entity_embeddings, model.entity_predictions, model.luke.pooler):
            unused.requires_grad_(False)
        return model

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the last hidden states (B, T, H); a mask that is added to the scores keeps documents apart."""
        import torch

        from terakoya.toolkit.architectures import attention

        embedded = model.luke.embeddings(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"] + first_position(model.config.pad_token_id),
            token_type_ids=torch.zeros_like(batch["input_ids"]),
        )
        mask = attention.additive(attention.document_mask(batch["document_ids"]))
        return model.luke.encoder(embedded, None, attention_mask=mask).last_hidden_state


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `luke`."""
    return {"luke": Luke}

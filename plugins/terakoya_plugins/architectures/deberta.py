"""DeBERTa (He et al., 2021, arXiv:2006.03654): attention that keeps content and relative position apart.

It has no enhanced mask decoder, with which the original adds absolute positions before the last layers in pre-training:
Transformers has no such layers and could not load a model trained with them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.encoder import EncoderArchitecture


class Deberta(EncoderArchitecture):
    """Fields have the names of Transformers' `DebertaConfig`; defaults are DeBERTa-base's."""

    config_class = "DebertaConfig"
    model_classes: ClassVar = {"masked": "DebertaForMaskedLM", "body": "DebertaModel"}
    vocabulary_head = ("cls",)
    document_masking = "mask_4d"
    autocast_weights = ("q_bias", "v_bias")

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: NonNegativeFloat = 0.1
    attention_probs_dropout_prob: NonNegativeFloat = 0.1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: NonNegativeInt = 0
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_eps: NonNegativeFloat = 1e-7
    relative_attention: bool = True
    max_relative_positions: int = -1
    """Number of distinct distances in each direction; -1: as many as `max_position_embeddings`."""
    pos_att_type: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    """Attention from content to position, from position to content, or both."""
    position_biased_input: bool = False
    """Whether absolute positions are added to the embeddings as well, as BERT does."""

    def max_sequence_length(self) -> int | None:
        """Returns `max_position_embeddings` with absolute positions, else None: relative positions have no bound."""
        return self.max_position_embeddings if self.position_biased_input else None


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `deberta`."""
    return {"deberta": Deberta}

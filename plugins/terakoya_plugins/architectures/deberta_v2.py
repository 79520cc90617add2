"""DeBERTa-v2 and v3 (He et al., 2021, arXiv:2006.03654 and 2111.09543): one set of projections for content and
position, relative positions in buckets that grow with distance.

v2 is this with the objective `masked_lm`, v3 with `replaced_token` and `"sharing": "disentangled"`. It has neither v2's
convolution parallel to the first layer, which would mix neighbouring documents, nor the enhanced mask decoder, which
Transformers does not have. Transformers does not have v3's head for replaced tokens either: the discriminator is a
token classifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head, Vocabulary
from terakoya.toolkit.architectures.encoder import EncoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class DebertaV2(EncoderArchitecture):
    """Fields have the names of Transformers' `DebertaV2Config`; defaults are DeBERTa-v3-base's."""

    config_class = "DebertaV2Config"
    model_classes: ClassVar = {
        "masked": "DebertaV2ForMaskedLM", "discriminator": "DebertaV2ForTokenClassification", "body": "DebertaV2Model"
    }  # fmt: skip
    vocabulary_head = ("cls",)
    document_masking = "mask_4d"
    test_settings: ClassVar = {"position_buckets": 8}

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
    """The largest distance with a bucket; -1: `max_position_embeddings`."""
    position_buckets: int = 256
    """Number of buckets of distances, in each direction; beyond half of them a bucket holds several. -1: no buckets."""
    pos_att_type: tuple[Literal["p2c", "c2p"], ...] = ("p2c", "c2p")
    """Attention from content to position, from position to content, or both."""
    share_att_key: bool = True
    """Whether content and position use the same projections."""
    norm_rel_ebd: Literal["layer_norm", "none"] = "layer_norm"
    position_biased_input: bool = False
    """Whether absolute positions are added to the embeddings as well, as BERT does."""

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns the model of `head`; the config of a discriminator names its two labels."""
        model = super().build(vocabulary, head)
        if head == "discriminator":
            model.config.id2label, model.config.label2id = (
                {0: "original", 1: "replaced"},
                {"original": 0, "replaced": 1},
            )
        return model

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, T) that a token was replaced, of `hidden` (B, T, H)."""
        scores = model.classifier(model.dropout(hidden))
        return scores[..., 1] - scores[..., 0]

    def max_sequence_length(self) -> int | None:
        """Returns `max_position_embeddings` with absolute positions, else None: relative positions have no bound."""
        return self.max_position_embeddings if self.position_biased_input else None


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `deberta_v2`."""
    return {"deberta_v2": DebertaV2}

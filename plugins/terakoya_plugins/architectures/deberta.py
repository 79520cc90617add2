"""DeBERTa (He et al., 2021, arXiv:2006.03654): attention that keeps content and relative position apart.

Without the original's enhanced mask decoder, which adds absolute positions before the last layers of pre-training:
Transformers has no such layers, so what was trained with them could not be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import encoder_models

if TYPE_CHECKING:
    import torch
    from transformers import DebertaConfig, PreTrainedModel


class Deberta(Architecture):
    """Fields bear the names of Transformers' `DebertaConfig`; defaults are DeBERTa-base's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"masked", "body"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "mask4d"

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
    """Distances told apart, in each direction; -1: as many as `max_position_embeddings`."""
    pos_att_type: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    """Content looks at position, position at content, or both."""
    position_biased_input: bool = False
    """Whether absolute positions are added to the embeddings as well, as BERT does."""

    def config(self, vocabulary: Vocabulary) -> DebertaConfig:
        """The `DebertaConfig`, its padding id and vocabulary size from `vocabulary`."""
        from transformers import DebertaConfig

        settings = self.model_dump() | {"pos_att_type": list(self.pos_att_type)}
        return DebertaConfig(**settings, vocab_size=vocabulary.size, pad_token_id=vocabulary.pad)

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`DebertaForMaskedLM` or `DebertaModel`."""
        from transformers import DebertaForMaskedLM, DebertaModel

        models: Mapping[str, type[PreTrainedModel]] = {"masked": DebertaForMaskedLM, "body": DebertaModel}
        return models[head](self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); documents in one row never see each other."""
        return encoder_models.hidden_by_mask(model, batch, lowered=("q_bias", "v_bias"))

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.cls(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The encoder's layers."""
        return encoder_models.blocks(model)

    def max_sequence_length(self) -> int | None:
        """One position embedding for each position, if there are any: relative positions have no end."""
        return self.max_position_embeddings if self.position_biased_input else None


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `deberta`."""
    return {"deberta": Deberta}

"""RoBERTa (Liu et al., 2019, arXiv:1907.11692): BERT without next sentences, whose positions count from the padding id.

Its own recipe: no next-sentence prediction, Adam with a second beta of 0.98, longer training on more text.
"""

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
    from transformers import PreTrainedModel, RobertaConfig


class Roberta(Architecture):
    """Fields bear the names of Transformers' `RobertaConfig`; defaults are RoBERTa-base's."""

    heads: ClassVar[frozenset[Head]] = frozenset({"masked", "body"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: NonNegativeFloat = 0.1
    attention_probs_dropout_prob: NonNegativeFloat = 0.1
    max_position_embeddings: PositiveInt = 512
    """The longest row. The config's own number is larger by padding id + 1, where RoBERTa's positions start: 514 of the
    published models."""
    type_vocab_size: PositiveInt = 1
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_eps: NonNegativeFloat = 1e-5

    def config(self, vocabulary: Vocabulary) -> RobertaConfig:
        """The `RobertaConfig`, its special ids and vocabulary size from `vocabulary`."""
        from transformers import RobertaConfig

        sizes = self.model_dump() | {"max_position_embeddings": self.max_position_embeddings + _first(vocabulary.pad)}
        return RobertaConfig(
            **sizes,
            vocab_size=vocabulary.size,
            pad_token_id=vocabulary.pad,
            bos_token_id=vocabulary.cls,
            eos_token_id=vocabulary.sep,
        )

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`RobertaForMaskedLM` or `RobertaModel`."""
        from transformers import RobertaForMaskedLM, RobertaModel

        models: Mapping[str, type[PreTrainedModel]] = {"masked": RobertaForMaskedLM, "body": RobertaModel}
        return models[head](self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); documents in one row never see each other."""
        positions = batch["position_ids"] + _first(model.config.pad_token_id)
        return encoder_models.hidden(model, {**batch, "position_ids": positions})

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.lm_head(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The encoder's layers."""
        return encoder_models.blocks(model)

    def max_sequence_length(self) -> int:
        """One position embedding for each position."""
        return self.max_position_embeddings


def _first(pad: int | None) -> int:
    """The position of a document's first token."""
    return (pad or 0) + 1


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `roberta`."""
    return {"roberta": Roberta}

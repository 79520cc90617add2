"""The architecture `example`: a BERT under another name, to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt
from terakoya import hookimpl
from terakoya.components import Architecture, Head
from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:  # torch and transformers are imported inside methods, so that the command line answers at once
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


class Example(Architecture):
    """An encoder for masked language modelling. Fields are the keys of the parameter JSON."""

    heads: ClassVar[frozenset[Head]] = frozenset({"masked"})
    # "interface": attention goes through Transformers' AttentionInterface, so documents can share a row.
    # "mask4d": it takes a mask made of attention.document_mask. "none": packed rows are refused by name.
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"

    # Named as the Transformers config names them: then `config` is one line.
    hidden_size: PositiveInt = 256
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    intermediate_size: PositiveInt = 1024
    max_position_embeddings: PositiveInt = 512
    hidden_dropout_prob: NonNegativeFloat = 0.1
    attention_probs_dropout_prob: NonNegativeFloat = 0.1

    def config(self, vocabulary: Vocabulary) -> PretrainedConfig:
        """The Transformers config: put yours here."""
        from transformers import BertConfig

        return BertConfig(**self.model_dump(), vocab_size=vocabulary.size, pad_token_id=vocabulary.pad)

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """A fresh model for one of `heads`: put yours here."""
        from transformers import BertForMaskedLM

        return BertForMaskedLM(self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H). For models in BERT's shape this does it; others call their body with
        `batch["input_ids"]`, `batch["position_ids"]` and `**attention.arguments(model, batch)` of
        `terakoya.toolkit.architectures`."""
        from terakoya.toolkit.architectures import encoder_models

        return encoder_models.hidden(model, batch)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """The vocabulary logits (..., V) of `hidden` (..., H). Called for the masked positions alone."""
        return model.cls(hidden)

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The layers, for compilation and activation checkpointing."""
        return list(model.base_model.encoder.layer)

    def max_sequence_length(self) -> int:
        """The longest row; None where there is no bound."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `example`: `"architecture": {"type": "example"}`."""
    return {"example": Example}

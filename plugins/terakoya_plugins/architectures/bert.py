"""BERT (Devlin et al., 2019, arXiv:1810.04805): a bidirectional Transformer encoder, as Transformers implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head, TensorPartition
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import encoder_models

if TYPE_CHECKING:
    import torch
    from transformers import BertConfig, PreTrainedModel


class Bert(Architecture):
    """Fields bear the names and defaults of Transformers' `BertConfig`: BERT-base."""

    heads: ClassVar[frozenset[Head]] = frozenset({"masked", "pretraining", "body"})
    isolation: ClassVar[Literal["interface", "mask4d", "none"]] = "interface"

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: NonNegativeFloat = 0.1
    attention_probs_dropout_prob: NonNegativeFloat = 0.1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: PositiveInt = 2
    initializer_range: NonNegativeFloat = 0.02
    layer_norm_eps: NonNegativeFloat = 1e-12

    def config(self, vocabulary: Vocabulary) -> BertConfig:
        """The `BertConfig`, its padding id and vocabulary size from `vocabulary`."""
        from transformers import BertConfig

        return BertConfig(**self.model_dump(), vocab_size=vocabulary.size, pad_token_id=vocabulary.pad)

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """`BertForMaskedLM`, `BertForPreTraining` (with the next-sentence head) or `BertModel`."""
        from transformers import BertForMaskedLM, BertForPreTraining, BertModel

        models: Mapping[str, type[PreTrainedModel]] = {
            "masked": BertForMaskedLM, "pretraining": BertForPreTraining, "body": BertModel
        }  # fmt: skip
        return models[head](self.config(vocabulary))

    def hidden(self, model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The last hidden states (B, T, H); documents in one row never see each other."""
        return encoder_models.hidden(model, batch)

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.cls.predictions(hidden)

    def next_sentence_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (B, 2) over {is next, is random}, from the pooled first position of `hidden` (B, T, H)."""
        return model.cls.seq_relationship(model.bert.pooler(hidden))

    def blocks(self, model: PreTrainedModel) -> Sequence[torch.nn.Module]:
        """The encoder's layers."""
        return encoder_models.blocks(model)

    def tensor_partition(self) -> TensorPartition:
        """Heads and the middle of the feed-forward."""
        return encoder_models.tensor_partition(self.num_attention_heads, self.intermediate_size)

    def max_sequence_length(self) -> int:
        """One position embedding for each position."""
        return self.max_position_embeddings


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Offers `bert`."""
    return {"bert": Bert}

"""BERT (Devlin et al., 2019, arXiv:1810.04805): a bidirectional Transformer encoder, as Transformers implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures.encoder import EncoderArchitecture, layer_partition

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Bert(EncoderArchitecture):
    """Fields have the names and defaults of Transformers' `BertConfig`: BERT-base."""

    config_class = "BertConfig"
    model_classes: ClassVar = {"masked": "BertForMaskedLM", "pretraining": "BertForPreTraining", "body": "BertModel"}
    vocabulary_head = ("cls.predictions",)

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

    def next_sentence_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, 2) over {is next, is random}, of the pooled first position of `hidden` (B, T, H)."""
        return model.cls.seq_relationship(model.bert.pooler(hidden))

    def tensor_partition(self) -> TensorPartition:
        """Divides heads and the middle of the feed-forward."""
        return layer_partition(self.num_attention_heads, self.intermediate_size)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `bert`."""
    return {"bert": Bert}

"""BERT (Devlin et al., 2019, arXiv:1810.04805): a bidirectional Transformer encoder, as Transformers implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder import EncoderArchitecture, layer_partition

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Bert(EncoderArchitecture):
    """Fields have the names and defaults of Transformers' `BertConfig`: BERT-base."""

    config_class = "BertConfig"
    bf16_stream = True
    model_classes: ClassVar = {"masked": "BertForMaskedLM", "pretraining": "BertForPreTraining", "body": "BertModel"}
    vocabulary_head = ("cls.predictions",)
    mup_widths = ("hidden_size", "num_attention_heads", "intermediate_size")

    hidden_size: shared.HiddenSize = 768
    num_hidden_layers: shared.NumHiddenLayers = 12
    num_attention_heads: shared.NumAttentionHeads = 12
    intermediate_size: shared.IntermediateSize = 3072
    hidden_act: shared.Activation = "gelu"
    hidden_dropout_prob: shared.HiddenDropout = 0.1
    attention_probs_dropout_prob: shared.AttentionDropout = 0.1
    max_position_embeddings: shared.MaxPositionEmbeddings = 512
    type_vocab_size: shared.TypeVocabSize = 2
    initializer_range: shared.InitializerRange = 0.02
    layer_norm_eps: shared.NormEps = 1e-12

    def next_sentence_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits (B, 2) over {is next, is random}, of the pooled first position of `hidden` (B, T, H)."""
        return model.cls.seq_relationship(model.bert.pooler(hidden))

    def tensor_partition(self) -> TensorPartition:
        return layer_partition(self.num_attention_heads, self.intermediate_size)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"bert": Bert}

"""ELECTRA (Clark et al., 2020, arXiv:2003.10555): narrower embeddings than BERT, and a head for replaced tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder import EncoderArchitecture, layer_partition

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Electra(EncoderArchitecture):
    """Fields have the names and defaults of Transformers' `ElectraConfig`: ELECTRA-small."""

    config_class = "ElectraConfig"
    bf16_stream = True
    model_classes: ClassVar = {
        "masked": "ElectraForMaskedLM", "discriminator": "ElectraForPreTraining", "body": "ElectraModel"
    }  # fmt: skip
    vocabulary_head = ("generator_predictions", "generator_lm_head")
    mup_widths = ("hidden_size", "embedding_size", "num_attention_heads", "intermediate_size")

    embedding_size: PositiveInt = 128
    """The width of the embeddings, which are projected to `hidden_size` where it differs."""
    hidden_size: shared.HiddenSize = 256
    num_hidden_layers: shared.NumHiddenLayers = 12
    num_attention_heads: shared.NumAttentionHeads = 4
    intermediate_size: shared.IntermediateSize = 1024
    hidden_act: shared.Activation = "gelu"
    hidden_dropout_prob: shared.HiddenDropout = 0.1
    attention_probs_dropout_prob: shared.AttentionDropout = 0.1
    max_position_embeddings: shared.MaxPositionEmbeddings = 512
    type_vocab_size: shared.TypeVocabSize = 2
    initializer_range: shared.InitializerRange = 0.02
    layer_norm_eps: shared.NormEps = 1e-12

    def replaced_logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        return model.discriminator_predictions(hidden)

    def tensor_partition(self) -> TensorPartition:
        return layer_partition(self.num_attention_heads, self.intermediate_size)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"electra": Electra}

"""RoBERTa (Liu et al., 2019, arXiv:1907.11692): BERT without next-sentence prediction; positions count from the padding
id.

Its training differs, too: no next-sentence prediction, Adam with a second beta of 0.98, longer training on more text.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder import TEXT_END_IDS, EncoderArchitecture, layer_partition


class Roberta(EncoderArchitecture):
    """Fields have the names of Transformers' `RobertaConfig`; defaults are RoBERTa-base's."""

    config_class = "RobertaConfig"
    bf16_stream = True
    config_ids = TEXT_END_IDS
    model_classes: ClassVar = {
        "masked": "RobertaForMaskedLM", "discriminator": "RobertaForTokenClassification", "body": "RobertaModel"
    }  # fmt: skip
    vocabulary_head, discriminator_head = ("lm_head",), ("dropout", "classifier")
    positions_follow_padding = True
    mup_widths = ("hidden_size", "num_attention_heads", "intermediate_size")

    hidden_size: shared.HiddenSize = 768
    num_hidden_layers: shared.NumHiddenLayers = 12
    num_attention_heads: shared.NumAttentionHeads = 12
    intermediate_size: shared.IntermediateSize = 3072
    hidden_act: shared.Activation = "gelu"
    hidden_dropout_prob: shared.HiddenDropout = 0.1
    attention_probs_dropout_prob: shared.AttentionDropout = 0.1
    max_position_embeddings: PositiveInt = 512
    """The longest row that the model can read. The config's own number is larger by padding id + 1, where
    RoBERTa's positions start: 514 in the published models. Unit: tokens."""
    type_vocab_size: shared.TypeVocabSize = 1
    initializer_range: shared.InitializerRange = 0.02
    layer_norm_eps: shared.NormEps = 1e-5

    def tensor_partition(self) -> TensorPartition:
        return layer_partition(self.num_attention_heads, self.intermediate_size)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"roberta": Roberta}

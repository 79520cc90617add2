"""RoBERTa (Liu et al., 2019, arXiv:1907.11692): BERT without next-sentence prediction; positions count from the padding
id.

Its training differs, too: no next-sentence prediction, Adam with a second beta of 0.98, longer training on more text.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures.encoder import EncoderArchitecture, layer_partition
from terakoya.toolkit.architectures.shared_settings import (
    Activation,
    AttentionDropout,
    HiddenDropout,
    HiddenSize,
    InitializerRange,
    IntermediateSize,
    NormEps,
    NumAttentionHeads,
    NumHiddenLayers,
)


class Roberta(EncoderArchitecture):
    """Fields have the names of Transformers' `RobertaConfig`; defaults are RoBERTa-base's."""

    config_class = "RobertaConfig"
    config_ids: ClassVar = {"pad_token_id": "pad", "bos_token_id": "cls", "eos_token_id": "sep"}
    model_classes: ClassVar = {"masked": "RobertaForMaskedLM", "body": "RobertaModel"}
    vocabulary_head = ("lm_head",)
    positions_follow_padding = True

    hidden_size: HiddenSize = 768
    num_hidden_layers: NumHiddenLayers = 12
    num_attention_heads: NumAttentionHeads = 12
    intermediate_size: IntermediateSize = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: HiddenDropout = 0.1
    attention_probs_dropout_prob: AttentionDropout = 0.1
    max_position_embeddings: PositiveInt = 512
    """The longest row that the model can read. The config's own number is larger by padding id + 1, where
    RoBERTa's positions start: 514 in the published models. Unit: tokens."""
    type_vocab_size: PositiveInt = 1
    """Number of segment types, each with an embedding."""
    initializer_range: InitializerRange = 0.02
    layer_norm_eps: NormEps = 1e-5

    def tensor_partition(self) -> TensorPartition:
        """Divides heads and the middle of the feed-forward."""
        return layer_partition(self.num_attention_heads, self.intermediate_size)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `roberta`."""
    return {"roberta": Roberta}

"""The architecture `example`: a BERT under another name, as a starting point."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveInt
from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.encoder import EncoderArchitecture


class Example(EncoderArchitecture):
    """An encoder for masked language modelling. Fields are the keys of the parameter JSON."""

    # Put the classes of your model in Transformers here, and the modules that compute its vocabulary logits.
    # EncoderArchitecture does everything else for models in BERT's shape. Where your model differs, override `config`,
    # `build`, `hidden`, `logits` or `blocks`; import torch and transformers inside methods only.
    config_class = "BertConfig"
    model_classes: ClassVar = {"masked": "BertForMaskedLM"}
    vocabulary_head = ("cls",)
    # "attention_interface": attention goes through Transformers' AttentionInterface, so documents can share a row.
    # "mask_4d": the encoder takes a mask (B, 1, T, T). "none": packed rows are refused by name.
    document_masking = "attention_interface"

    # Name fields as the Transformers config names them.
    hidden_size: PositiveInt = 256
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    intermediate_size: PositiveInt = 1024
    max_position_embeddings: PositiveInt = 512
    hidden_dropout_prob: NonNegativeFloat = 0.1
    """The share of hidden values that dropout sets to zero."""
    attention_probs_dropout_prob: NonNegativeFloat = 0.1
    """The share of attention weights that dropout sets to zero."""


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `example`: `"architecture": {"type": "example"}`."""
    return {"example": Example}

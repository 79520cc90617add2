"""Mistral (Jiang et al., 2023, arXiv:2310.06825): Llama's block; a position sees only so many positions before it.

Those further back reach it through the layers between.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture


class Mistral(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `MistralConfig`; defaults are Mistral 7B's, version 0.1."""

    config_class = "MistralConfig"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "MistralForCausalLM"}
    mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    test_settings: ClassVar = {"num_key_value_heads": 2, "sliding_window": 4}

    hidden_size: shared.HiddenSize = 4096
    intermediate_size: shared.IntermediateSize = 14336
    num_hidden_layers: shared.NumHiddenLayers = 32
    num_attention_heads: shared.NumAttentionHeads = 32
    num_key_value_heads: shared.NumKeyValueHeads = 8
    max_position_embeddings: shared.MaxPositionEmbeddings = 32_768
    hidden_act: shared.Activation = "silu"
    rms_norm_eps: shared.NormEps = 1e-5
    sliding_window: PositiveInt | None = 4096
    """Positions that a position sees, itself included; null: all before it, as from version 0.2. Unit: tokens."""


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"mistral": Mistral}

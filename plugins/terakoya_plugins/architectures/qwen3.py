"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): Llama's block with an independent head size, and norms on queries and
keys."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture


class Qwen3(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `Qwen3Config`; defaults are Qwen3-0.6B's."""

    config_class = "Qwen3Config"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "Qwen3ForCausalLM"}
    mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    per_head_modules = ("self_attn.q_norm", "self_attn.k_norm")
    test_settings: ClassVar = {"num_key_value_heads": 2, "head_dim": 8}

    hidden_size: shared.HiddenSize = 1024
    intermediate_size: shared.IntermediateSize = 3072
    num_hidden_layers: shared.NumHiddenLayers = 28
    num_attention_heads: shared.NumAttentionHeads = 16
    num_key_value_heads: shared.NumKeyValueHeads = 8
    head_dim: shared.HeadDim = 128
    hidden_act: shared.Activation = "silu"
    max_position_embeddings: shared.MaxPositionEmbeddings = 32_768
    rope_theta: shared.RopeTheta = 1_000_000.0
    attention_bias: shared.AttentionBias = False
    tie_word_embeddings: shared.TieWordEmbeddings = True
    use_sliding_window: bool = False
    """Whether the layers from number `max_window_layers` on see only the last `sliding_window` positions."""
    sliding_window: PositiveInt = 4096
    """Positions that a layer with a sliding window sees. Unit: tokens."""
    max_window_layers: NonNegativeInt = 28
    """The number of the first layer with a sliding window, where `use_sliding_window` is true."""


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"qwen3": Qwen3}

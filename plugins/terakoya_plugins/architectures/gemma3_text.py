"""Gemma 3 (Gemma team, 2025, arXiv:2503.19786), its text model: norms before and after attention and feed-forward,
norms on queries and keys, embeddings scaled by the root of their width, mostly local attention.

Every `sliding_window_pattern`-th layer sees its whole document, the others `sliding_window` positions.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Vocabulary
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture


class Gemma3Text(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `Gemma3TextConfig`, of 4.50 where later ones join several; defaults
    are Gemma 3 270M's."""

    config_class = "Gemma3TextConfig"
    undeclared_arguments: ClassVar = frozenset({"sliding_window_pattern"})
    bf16_stream = True
    model_classes: ClassVar = {"causal": "Gemma3ForCausalLM"}
    per_head_modules = ("self_attn.q_norm", "self_attn.k_norm")
    test_settings: ClassVar = {
        "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
        "sliding_window_pattern": 2,
    }  # fmt: skip

    hidden_size: shared.HiddenSize = 640
    intermediate_size: shared.IntermediateSize = 2048
    num_hidden_layers: shared.NumHiddenLayers = 18
    num_attention_heads: shared.NumAttentionHeads = 4
    num_key_value_heads: shared.NumKeyValueHeads = 1
    head_dim: shared.HeadDim = 256
    max_position_embeddings: shared.MaxPositionEmbeddings = 32_768
    hidden_activation: shared.Activation = "gelu_pytorch_tanh"
    rope_theta: shared.RopeTheta = 1_000_000.0
    rope_local_base_freq: PositiveFloat = 10_000.0
    """The base of the rotary positions in local layers."""
    query_pre_attn_scalar: PositiveInt = 256
    """Attention scores are divided by its root, in the place of the root of `head_dim`."""
    sliding_window: PositiveInt = 512
    """Positions that a position of a local layer sees, itself included. Unit: tokens."""
    sliding_window_pattern: PositiveInt = 6
    """One layer of this many sees all positions before it, with `rope_theta`; the others are local."""
    attention_bias: shared.AttentionBias = False
    tie_word_embeddings: shared.TieWordEmbeddings = True

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the special ids, with both bases of rotary positions."""
        arguments = super().config_arguments(vocabulary)
        local = {"rope_type": "default", "rope_theta": arguments.pop("rope_local_base_freq")}
        return arguments | {
            "rope_parameters": {"full_attention": arguments["rope_parameters"], "sliding_attention": local}
        }


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"gemma3_text": Gemma3Text}

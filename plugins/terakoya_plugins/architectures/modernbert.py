"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): rotary positions, gated feed-forward, mostly local attention.

Every `global_attn_every_n_layers`-th layer sees its whole document, the others `local_attention` positions.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.encoder import EncoderArchitecture


class ModernBert(EncoderArchitecture):
    """Fields have the names of Transformers' `ModernBertConfig`; defaults are ModernBERT-base's."""

    config_class = "ModernBertConfig"
    config_ids: ClassVar = {
        "pad_token_id": "pad",
        **{"bos_token_id": "cls", "cls_token_id": "cls", "eos_token_id": "sep", "sep_token_id": "sep"},
    }
    model_classes: ClassVar = {"masked": "ModernBertForMaskedLM", "body": "ModernBertModel"}
    vocabulary_head, block_list, calls_whole_body = ("head", "decoder"), "layers", True
    test_settings: ClassVar = {"local_attention": 8}

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 22
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 1152
    hidden_activation: str = "gelu"
    max_position_embeddings: PositiveInt = 8192
    initializer_range: NonNegativeFloat = 0.02
    initializer_cutoff_factor: PositiveFloat = 2.0
    norm_eps: NonNegativeFloat = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    attention_dropout: NonNegativeFloat = 0.0
    embedding_dropout: NonNegativeFloat = 0.0
    mlp_bias: bool = False
    mlp_dropout: NonNegativeFloat = 0.0
    decoder_bias: bool = True
    local_attention: PositiveInt = 128
    """Positions that a local layer sees, half of them on each side."""
    global_attn_every_n_layers: PositiveInt = 3
    global_rope_theta: PositiveFloat = 160_000.0
    local_rope_theta: PositiveFloat = 10_000.0


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `modernbert`."""
    return {"modernbert": ModernBert}

"""ModernBERT (Warner et al., 2024, arXiv:2412.13663): rotary positions, gated feed-forward, mostly local attention.

Every `global_attn_every_n_layers`-th layer sees its whole document, the others `local_attention` positions.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder import TEXT_END_IDS, EncoderArchitecture


class ModernBert(EncoderArchitecture):
    """Fields have the names of Transformers' `ModernBertConfig`; defaults are ModernBERT-base's."""

    config_class = "ModernBertConfig"
    bf16_stream = True
    config_ids: ClassVar = {**TEXT_END_IDS, "cls_token_id": "cls", "sep_token_id": "sep"}
    model_classes: ClassVar = {
        "masked": "ModernBertForMaskedLM", "discriminator": "ModernBertForTokenClassification",
        "body": "ModernBertModel",
    }  # fmt: skip
    vocabulary_head, discriminator_head = ("head", "decoder"), ("head", "drop", "classifier")
    block_list, calls_whole_body = "layers", True
    output_layers = ("Wo",)
    fused_layers: ClassVar = {"Wqkv": 3, "Wi": 2}
    test_settings: ClassVar = {"local_attention": 8}

    hidden_size: shared.HiddenSize = 768
    num_hidden_layers: shared.NumHiddenLayers = 22
    num_attention_heads: shared.NumAttentionHeads = 12
    intermediate_size: shared.IntermediateSize = 1152
    hidden_activation: shared.Activation = "gelu"
    max_position_embeddings: shared.MaxPositionEmbeddings = 8192
    initializer_range: shared.InitializerRange = 0.02
    initializer_cutoff_factor: PositiveFloat = 2.0
    """Initial weights are cut off at this many standard deviations."""
    norm_eps: shared.NormEps = 1e-5
    norm_bias: bool = False
    """Whether layer norms have biases."""
    attention_bias: shared.AttentionBias = False
    attention_dropout: shared.AttentionDropout = 0.0
    embedding_dropout: shared.EmbeddingDropout = 0.0
    mlp_bias: bool = False
    """Whether the linear layers of the feed-forward have biases."""
    mlp_dropout: NonNegativeFloat = 0.0
    """The dropout probability inside the feed-forward."""
    decoder_bias: bool = True
    """Whether the vocabulary head has a bias."""
    local_attention: PositiveInt = 128
    """Positions that a local layer sees, half of them on each side."""
    global_attn_every_n_layers: PositiveInt = 3
    """One layer of this many sees all positions, with `global_rope_theta`; the others are local."""
    global_rope_theta: shared.RopeTheta = 160_000.0
    local_rope_theta: shared.RopeTheta = 10_000.0


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `modernbert`."""
    return {"modernbert": ModernBert}

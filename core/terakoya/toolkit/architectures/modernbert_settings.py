"""The settings that ModernBERT and the decoder of its kind share, by Transformers' names."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.transformers_model import TransformersArchitecture


class ModernBertSettings(TransformersArchitecture):
    """Defaults are ModernBERT-base's."""

    undeclared_arguments: ClassVar = frozenset({"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"})

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
    """Positions that a local layer sees where it sees both sides, half of them on each; half of them where it sees what
    is before alone."""
    global_attn_every_n_layers: PositiveInt = 3
    """One layer of this many sees all positions, with `global_rope_theta`; the others are local."""
    global_rope_theta: shared.RopeTheta = 160_000.0

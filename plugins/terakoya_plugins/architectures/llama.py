"""Llama (Touvron et al., 2023, arXiv:2302.13971): rotary positions, RMS norms, SwiGLU, no biases; heads that share keys
and values (Ainslie et al., 2023, arXiv:2305.13245)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture
from terakoya.toolkit.architectures.shared_settings import (
    Activation,
    AttentionDropout,
    HiddenSize,
    InitializerRange,
    IntermediateSize,
    MaxPositionEmbeddings,
    NormEps,
    NumAttentionHeads,
    NumHiddenLayers,
    RopeTheta,
    TieWordEmbeddings,
)


class Llama(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `LlamaConfig`; defaults are the first 7B's."""

    config_class = "LlamaConfig"
    model_classes: ClassVar = {"causal": "LlamaForCausalLM"}
    test_settings: ClassVar = {"num_key_value_heads": 2}

    hidden_size: HiddenSize = 4096
    intermediate_size: IntermediateSize = 11008
    num_hidden_layers: NumHiddenLayers = 32
    num_attention_heads: NumAttentionHeads = 32
    num_key_value_heads: PositiveInt | None = None
    """Heads of keys and values, each shared by equally many neighbouring query heads; null is one for each."""
    hidden_act: Activation = "silu"
    max_position_embeddings: MaxPositionEmbeddings = 2048
    initializer_range: InitializerRange = 0.02
    rms_norm_eps: NormEps = 1e-6
    rope_theta: RopeTheta = 10_000.0
    attention_dropout: AttentionDropout = 0.0
    tie_word_embeddings: TieWordEmbeddings = False
    scaled_init: bool = False
    """Whether output layers are initialised smaller by sqrt(2 x layers), as in Megatron-LM."""


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `llama`."""
    return {"llama": Llama}

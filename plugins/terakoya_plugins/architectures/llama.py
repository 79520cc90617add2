"""Llama (Touvron et al., 2023, arXiv:2302.13971): rotary positions, RMS norms, SwiGLU, no biases; heads that share keys
and values (Ainslie et al., 2023, arXiv:2305.13245)."""

from __future__ import annotations

from typing import ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture


class Llama(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `LlamaConfig`; defaults are the first 7B's."""

    config_class = "LlamaConfig"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "LlamaForCausalLM"}
    mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    test_settings: ClassVar = {"num_key_value_heads": 2}

    hidden_size: shared.HiddenSize = 4096
    intermediate_size: shared.IntermediateSize = 11008
    num_hidden_layers: shared.NumHiddenLayers = 32
    num_attention_heads: shared.NumAttentionHeads = 32
    max_position_embeddings: shared.MaxPositionEmbeddings = 2048
    hidden_act: shared.Activation = "silu"


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"llama": Llama}

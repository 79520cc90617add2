"""OLMo 2 (OLMo team, 2024, arXiv:2501.00656): Llama's block with norms after attention and feed-forward, not before,
and norms on queries and keys."""

from __future__ import annotations

from typing import ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import GatedDecoderArchitecture


class Olmo2(GatedDecoderArchitecture):
    """Fields have the names of Transformers' `Olmo2Config`; defaults are OLMo 2 1B's."""

    config_class = "Olmo2Config"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "Olmo2ForCausalLM"}
    mup_widths = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    partition_obstacle = "its norms of queries and keys run over all heads together"
    test_settings: ClassVar = {"num_key_value_heads": 2}

    hidden_size: shared.HiddenSize = 2048
    intermediate_size: shared.IntermediateSize = 8192
    num_hidden_layers: shared.NumHiddenLayers = 16
    num_attention_heads: shared.NumAttentionHeads = 16
    max_position_embeddings: shared.MaxPositionEmbeddings = 4096
    hidden_act: shared.Activation = "silu"
    rope_theta: shared.RopeTheta = 500_000.0
    attention_bias: shared.AttentionBias = False

    def tensor_partition(self) -> None:
        return


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"olmo2": Olmo2}

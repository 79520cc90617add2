"""GPT-2 (Radford et al., 2019): a causal Transformer with learned positions, norms before its layers, a tied head."""

from __future__ import annotations

from typing import ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import DecoderArchitecture


class GPT2(DecoderArchitecture):
    """Fields have the names of Transformers' `GPT2Config`; defaults are the smallest GPT-2's."""

    config_class = "GPT2Config"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "GPT2LMHeadModel"}
    block_list, final_norm, position_embedding, embedding_dropout_layer = "h", "ln_f", "wpe", "drop"
    output_layers, scales_output_layers = ("c_proj",), True
    fused_layers: ClassVar = {"c_attn": 3}
    fuses_gelu = True
    mup_widths = ("hidden_size", "num_attention_heads", "n_inner")

    hidden_size: shared.HiddenSize = 768
    num_hidden_layers: shared.NumHiddenLayers = 12
    num_attention_heads: shared.NumAttentionHeads = 12
    n_inner: shared.InnerSize = None
    activation_function: shared.Activation = "gelu_new"
    max_position_embeddings: shared.MaxPositionEmbeddings = 1024
    resid_pdrop: shared.ResidualDropout = 0.1
    embd_pdrop: shared.EmbeddingDropout = 0.1
    attn_pdrop: shared.AttentionDropout = 0.1
    layer_norm_epsilon: shared.NormEps = 1e-5
    initializer_range: shared.InitializerRange = 0.02
    tie_word_embeddings: shared.TieWordEmbeddings = True
    scaled_init: shared.ScaledInit = True

    def tensor_partition(self) -> TensorPartition:
        """Divides heads, whose queries, keys and values come from one layer, and the middle of the feed-forward."""
        return TensorPartition(
            sizes={"num_attention_heads": self.num_attention_heads, "n_inner": self.n_inner or 4 * self.hidden_size},
            inputs=("attn", "mlp"),
            column_parallel={"attn.c_attn": 3, "mlp.c_fc": 1},
            row_parallel=("attn.c_proj", "mlp.c_proj"),
            divided_attributes={"attn": ("num_heads", "split_size")},
        )


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"gpt2": GPT2}

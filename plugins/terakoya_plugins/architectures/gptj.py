"""GPT-J (Wang and Komatsuzaki, 2021): rotary positions on a part of each head, attention and feed-forward in parallel.

Transformers' GPT-J has its own attention, with its softmax in float32, and adds the mask to its scores.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import DecoderArchitecture


class GPTJ(DecoderArchitecture):
    """Fields have the names of Transformers' `GPTJConfig`; defaults are GPT-J 6B's."""

    config_class = "GPTJConfig"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "GPTJForCausalLM"}
    document_masking = "mask_4d"
    block_list, final_norm, embedding_dropout_layer, output_layers = "h", "ln_f", "drop", ("out_proj", "fc_out")
    fuses_gelu = True
    mup_widths = ("hidden_size", "num_attention_heads", "n_inner")
    test_settings: ClassVar = {"rotary_dim": 2}

    hidden_size: shared.HiddenSize = 4096
    num_hidden_layers: shared.NumHiddenLayers = 28
    num_attention_heads: shared.NumAttentionHeads = 16
    rotary_dim: PositiveInt = 64
    """Number of dimensions of each head with rotary positions."""
    n_inner: shared.InnerSize = None
    activation_function: shared.Activation = "gelu_new"
    max_position_embeddings: shared.MaxPositionEmbeddings = 2048
    resid_pdrop: shared.ResidualDropout = 0.0
    embd_pdrop: shared.EmbeddingDropout = 0.0
    attn_pdrop: shared.AttentionDropout = 0.0
    layer_norm_epsilon: shared.NormEps = 1e-5
    initializer_range: shared.InitializerRange = 0.02
    tie_word_embeddings: shared.TieWordEmbeddings = False
    scaled_init: shared.ScaledInit = False

    def tensor_partition(self) -> TensorPartition:
        return TensorPartition(
            sizes={"num_attention_heads": self.num_attention_heads, "n_inner": self.n_inner or 4 * self.hidden_size},
            inputs=("attn", "mlp"),
            column_parallel={"attn.q_proj": 1, "attn.k_proj": 1, "attn.v_proj": 1, "mlp.fc_in": 1},
            row_parallel=("attn.out_proj", "mlp.fc_out"),
            divided_attributes={"attn": ("num_attention_heads",)},
        )


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"gptj": GPTJ}

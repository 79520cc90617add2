"""GPT-2 (Radford et al., 2019): a causal Transformer with learned positions, norms before its layers, a tied head."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition
from terakoya.toolkit.architectures.decoder import DecoderArchitecture
from terakoya.toolkit.architectures.shared_settings import (
    Activation,
    AttentionDropout,
    EmbeddingDropout,
    HiddenSize,
    InitializerRange,
    MaxPositionEmbeddings,
    NormEps,
    NumAttentionHeads,
    NumHiddenLayers,
    ResidualDropout,
    TieWordEmbeddings,
)


class GPT2(DecoderArchitecture):
    """Fields have the names of Transformers' `GPT2Config`; defaults are the smallest GPT-2's."""

    config_class = "GPT2Config"
    model_classes: ClassVar = {"causal": "GPT2LMHeadModel"}
    block_list, final_norm, position_embedding, embedding_dropout = "h", "ln_f", "wpe", "drop"
    output_layers, scales_output_layers = ("c_proj",), True
    fuses_gelu = True

    hidden_size: HiddenSize = 768
    num_hidden_layers: NumHiddenLayers = 12
    num_attention_heads: NumAttentionHeads = 12
    n_inner: PositiveInt | None = None
    """The width of the feed-forward layers; null is four times `hidden_size`."""
    activation_function: Activation = "gelu_new"
    max_position_embeddings: MaxPositionEmbeddings = 1024
    resid_pdrop: ResidualDropout = 0.1
    embd_pdrop: EmbeddingDropout = 0.1
    attn_pdrop: AttentionDropout = 0.1
    layer_norm_epsilon: NormEps = 1e-5
    initializer_range: InitializerRange = 0.02
    tie_word_embeddings: TieWordEmbeddings = True
    scaled_init: bool = True
    """Whether output layers are initialised smaller by sqrt(2 x layers), as in GPT-2."""

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
    """Registers `gpt2`."""
    return {"gpt2": GPT2}

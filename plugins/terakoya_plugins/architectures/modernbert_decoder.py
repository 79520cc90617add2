"""The decoder of ModernBERT's kind (Weller et al., 2025, Ettin, arXiv:2507.11412): ModernBERT's blocks, in which a
position sees only what is before it.

Every `global_attn_every_n_layers`-th layer sees its whole document up to a position, the others `local_attention` / 2
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from terakoya import hookimpl
from terakoya.components import Architecture, TensorPartition, Vocabulary
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import DecoderArchitecture
from terakoya.toolkit.architectures.modernbert_settings import ModernBertSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class ModernBertDecoder(ModernBertSettings, DecoderArchitecture):
    """Fields have the names of Transformers' `ModernBertDecoderConfig`; defaults are Ettin 150M's."""

    config_class = "ModernBertDecoderConfig"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "ModernBertDecoderForCausalLM"}
    final_norm, whole_embedding = "final_norm", "embeddings"
    output_layers, scales_output_layers = ("Wo",), True
    fused_layers: ClassVar = {"Wi": 2}
    mup_widths = ("hidden_size", "num_attention_heads", "intermediate_size")
    test_settings: ClassVar = {"local_attention": 8}

    tie_word_embeddings: shared.TieWordEmbeddings = True
    local_rope_theta: shared.RopeTheta = 160_000.0
    """The base in local layers. Only Transformers 5 reads a model in which it is not `global_rope_theta`."""

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the special ids, which the config must have: where the
        vocabulary has none, they are the id that ends documents."""
        given = {
            "pad_token_id": vocabulary.pad, "bos_token_id": vocabulary.bos,
            "cls_token_id": vocabulary.cls, "sep_token_id": vocabulary.sep,
        }  # fmt: skip
        ids = {name: (vocabulary.end or 0) if each is None else each for name, each in given.items()}
        return super().config_arguments(vocabulary) | ids

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        return model.decoder(model.lm_head(hidden))

    def tensor_partition(self) -> TensorPartition:
        """Divides heads and the middle of the feed-forward, whose first layer also makes its gate."""
        return TensorPartition(
            sizes={"num_attention_heads": self.num_attention_heads, "intermediate_size": self.intermediate_size},
            inputs=("attn", "mlp"),
            column_parallel={**{f"attn.{name}_proj": 1 for name in ("q", "k", "v")}, "mlp.Wi": 2},
            row_parallel=("attn.Wo", "mlp.Wo"),
            dropouts=("mlp_dropout",),
        )

    def keep_stage_blocks(self, model: PreTrainedModel, stage: range) -> None:
        """See `Architecture.keep_stage_blocks`; what follows the last block has a norm of its own."""
        from torch.nn import Identity

        if stage.stop < len(model.base_model.layers):
            model.lm_head = Identity()
        super().keep_stage_blocks(model, stage)


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"modernbert_decoder": ModernBertDecoder}

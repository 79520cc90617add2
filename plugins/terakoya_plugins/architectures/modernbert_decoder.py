"""The decoder of ModernBERT's kind (Weller et al., 2025, Ettin, arXiv:2507.11412): ModernBERT's blocks, in which a
position sees only what is before it.

Every `global_attn_every_n_layers`-th layer sees its whole document up to a position, the others `local_attention` / 2
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya import hookimpl
from terakoya.components import Architecture, Head, TensorPartition, Vocabulary
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.decoder import DecoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class ModernBertDecoder(DecoderArchitecture):
    """Fields have the names of Transformers' `ModernBertDecoderConfig`; defaults are Ettin 150M's."""

    config_class = "ModernBertDecoderConfig"
    bf16_stream = True
    model_classes: ClassVar = {"causal": "ModernBertDecoderForCausalLM"}
    final_norm = "final_norm"
    output_layers, scales_output_layers = ("Wo",), True
    fused_layers: ClassVar = {"Wi": 2}
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
    tie_word_embeddings: shared.TieWordEmbeddings = True
    local_attention: PositiveInt = 128
    """Twice the positions that a position of a local layer sees, itself included: as many as in ModernBERT, whose
    positions see both sides."""
    global_attn_every_n_layers: PositiveInt = 3
    """One layer of this many sees all positions, with `global_rope_theta`; the others are local."""
    global_rope_theta: shared.RopeTheta = 160_000.0
    local_rope_theta: shared.RopeTheta = 160_000.0
    """The base of the rotary positions in local layers. Transformers 4 reads `global_rope_theta` for these, too, so
    only Transformers 5 reads a model in which the two differ."""

    def config_arguments(self, vocabulary: Vocabulary) -> dict[str, Any]:
        """Returns the fields, the vocabulary's size and the special ids, which the config must have: where the
        vocabulary has none, they are the id that ends documents."""
        end = vocabulary.end or 0
        given = {
            "pad_token_id": vocabulary.pad, "bos_token_id": vocabulary.bos,
            "cls_token_id": vocabulary.cls, "sep_token_id": vocabulary.sep,
        }  # fmt: skip
        ids = {name: end if each is None else each for name, each in given.items()}
        return super().config_arguments(vocabulary) | ids

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model. A padding id that also ends documents is learnt like any other."""
        model = super().build(vocabulary, head)
        if model.config.pad_token_id == vocabulary.end:
            words: Any = model.get_input_embeddings()
            words.padding_idx = None
        return model

    def logits(self, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the vocabulary logits (..., V) of `hidden` (..., H)."""
        return model.decoder(model.lm_head(hidden))

    def tensor_partition(self) -> TensorPartition:
        """Divides heads and the middle of the feed-forward, whose first layer also makes its gate."""
        return TensorPartition(
            sizes={"num_attention_heads": self.num_attention_heads, "intermediate_size": self.intermediate_size},
            inputs=("attn", "mlp"),
            column_parallel={**{f"attn.{name}_proj": 1 for name in ("q", "k", "v")}, "mlp.Wi": 2},
            row_parallel=("attn.Wo", "mlp.Wo"),
        )

    def keep_stage_blocks(self, model: PreTrainedModel, stage: range) -> None:
        """See `Architecture.keep_stage_blocks`; the model norms what it embeds, and looks up the kind of its n-th
        layer."""
        from torch.nn import Identity

        last = stage.stop == len(model.base_model.layers)
        super().keep_stage_blocks(model, stage)
        model.config.layer_types = model.config.layer_types[stage.start : stage.stop]
        if stage.start > 0:
            model.base_model.embeddings = _given_embeddings()
        if not last:
            model.lm_head = Identity()


def _given_embeddings() -> torch.nn.Module:
    """Returns a module in the place of a model's embeddings that takes hidden states as they are."""
    import torch

    class GivenEmbeddings(torch.nn.Module):
        """Returns `inputs_embeds` (B, T, H)."""

        def forward(self, input_ids: None, inputs_embeds: torch.Tensor) -> torch.Tensor:
            return inputs_embeds

    return GivenEmbeddings()


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `modernbert_decoder`."""
    return {"modernbert_decoder": ModernBertDecoder}

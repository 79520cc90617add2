"""Encoders of DeBERTa's kind: attention that keeps content and relative position apart.

torch is imported inside functions, so that listing architectures stays quick.
Letters in shapes: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt

from terakoya.components import DocumentMasking, Head, Vocabulary
from terakoya.toolkit.architectures import shared_settings as shared
from terakoya.toolkit.architectures.encoder import EncoderArchitecture

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class DisentangledEncoder(EncoderArchitecture):
    """The base of DeBERTa's families, with the fields that they share; defaults are those of the base size."""

    vocabulary_head = ("cls",)
    document_masking: ClassVar[DocumentMasking] = "mask_4d"
    mup_widths = ("hidden_size", "num_attention_heads", "intermediate_size")

    hidden_size: shared.HiddenSize = 768
    num_hidden_layers: shared.NumHiddenLayers = 12
    num_attention_heads: shared.NumAttentionHeads = 12
    intermediate_size: shared.IntermediateSize = 3072
    hidden_act: shared.Activation = "gelu"
    hidden_dropout_prob: shared.HiddenDropout = 0.1
    attention_probs_dropout_prob: shared.AttentionDropout = 0.1
    max_position_embeddings: shared.MaxPositionEmbeddings = 512
    type_vocab_size: NonNegativeInt = 0
    """Number of segment types, each with an embedding; 0 is none."""
    initializer_range: shared.InitializerRange = 0.02
    layer_norm_eps: shared.NormEps = 1e-7
    relative_attention: bool = True
    """Whether attention uses the distance between positions, besides content."""
    pos_att_type: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    """Attention from content to position, from position to content, or both."""
    position_biased_input: bool = False
    """Whether absolute positions are added to the embeddings as well, as BERT does."""

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model, with attention that fits autocast, does not wait for a GPU, and leaves
        nothing to the host."""
        from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

        _compute_scales_on_the_device()
        model = super().build(vocabulary, head)
        fit_autocast(model)
        for part in model.modules():
            if isinstance(part, DebertaV2Encoder):
                part.__class__ = _encoder_without_waiting()
        return model

    def max_sequence_length(self) -> int | None:
        """Returns `max_position_embeddings` with absolute positions, else None: relative positions have no bound."""
        return self.max_position_embeddings if self.position_biased_input else None


def fit_autocast(model: torch.nn.Module) -> None:
    """Lets each attention of DeBERTa's in `model` compute under autocast, where Transformers' fails. Numbers without
    autocast do not change."""
    from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

    for part in model.modules():
        if isinstance(part, DisentangledSelfAttention):
            part.__class__ = _autocast_attention()


@cache
def _compute_scales_on_the_device() -> None:
    """Replaces functions of Transformers' modules that make tensors of one number on the host: a CUDA graph, which
    records what the device does, cannot hold those. The numbers are the same."""
    from transformers.models.deberta import modeling_deberta
    from transformers.models.deberta_v2 import modeling_deberta_v2

    for module in (modeling_deberta, modeling_deberta_v2):
        module.scaled_size_sqrt = scaled_size_sqrt
    modeling_deberta.compute_attention_span = attention_span


def scaled_size_sqrt(states: torch.Tensor, scale_factor: int) -> torch.Tensor:
    """Returns the root of the last size of `states` times `scale_factor`, () float32 on their device. Its last bit is
    that of torch's root, which is not always Python's."""
    import torch

    return states.new_full((), states.size(-1) * scale_factor, dtype=torch.float32).sqrt()


def attention_span(query: torch.Tensor, key: torch.Tensor, max_relative_positions: int) -> int:
    """Returns how far positions of `query` and `key` (B, N, T, D) may be from each other."""
    return min(max(query.size(-2), key.size(-2)), max_relative_positions)


@cache
def _autocast_attention() -> type[torch.nn.Module]:
    """Returns DeBERTa's attention for autocast, which converts the operands of products but not the biases of queries
    and values, which are added: the result would be float32. Attention of v2 has none."""
    import torch
    from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

    class AutocastAttention(DisentangledSelfAttention):
        def transpose_for_scores(self, states: torch.Tensor) -> torch.Tensor:
            device = states.device.type
            low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
            return super().transpose_for_scores(states.to(low))

    return AutocastAttention


@cache
def _encoder_without_waiting() -> type[torch.nn.Module]:
    """Returns Transformers' encoder, but for a number that Transformers copies to the device in each forward: the host
    waits for such a copy."""
    import torch
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

    class EncoderWithoutWaiting(DebertaV2Encoder):
        def get_rel_pos(
            self,
            hidden_states: torch.Tensor,
            query_states: torch.Tensor | None = None,
            relative_pos: torch.Tensor | None = None,
        ) -> torch.Tensor | None:
            if not self.relative_attention or relative_pos is not None or query_states is not None:
                return super().get_rel_pos(hidden_states, query_states, relative_pos)
            position = torch.arange(hidden_states.size(-2), device=hidden_states.device)
            distances = position[:, None] - position
            if self.position_buckets > 0 and self.max_relative_positions > 0:
                distances = distance_buckets(distances, self.position_buckets, self.max_relative_positions)
            return distances[None]

    return EncoderWithoutWaiting


def distance_buckets(distances: torch.Tensor, buckets: int, largest: int) -> torch.Tensor:
    """Returns the bucket of each of `distances` (T, T) int64: beyond half of the `buckets` they grow with the logarithm
    of the distance, up to `largest`. The numbers are those of Transformers' `make_log_bucket_position`."""
    import torch

    middle = buckets // 2
    width = torch.log(distances.new_full((), (largest - 1) / middle, dtype=torch.float32))
    size = torch.where(distances.abs() < middle, middle - 1, distances.abs())
    far = torch.ceil(torch.log(size / middle) / width * (middle - 1)) + middle
    return torch.where(size <= middle, distances.to(far.dtype), far * distances.sign()).long()

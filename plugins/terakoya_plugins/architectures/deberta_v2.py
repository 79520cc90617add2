"""DeBERTa-v2 and v3 (He et al., 2021, arXiv:2006.03654 and 2111.09543): one set of projections for content and
position, relative positions in buckets that grow with distance.

v2 is this with the objective `masked_lm`, v3 with `replaced_token` and `"sharing": "disentangled"`. It has neither v2's
convolution parallel to the first layer, which would mix neighbouring documents, nor the enhanced mask decoder, which
Transformers does not have. Transformers does not have v3's head for replaced tokens either: the discriminator is a
token classifier.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

from terakoya import hookimpl
from terakoya.components import Architecture, Head, Vocabulary
from terakoya.toolkit.architectures.disentangled import DisentangledEncoder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class DebertaV2(DisentangledEncoder):
    """Fields have the names of Transformers' `DebertaV2Config`; defaults are DeBERTa-v3-base's."""

    config_class = "DebertaV2Config"
    model_classes: ClassVar = {
        "masked": "DebertaV2ForMaskedLM", "discriminator": "DebertaV2ForTokenClassification", "body": "DebertaV2Model"
    }  # fmt: skip
    test_settings: ClassVar = {"position_buckets": 8}

    max_relative_positions: int = -1
    """The largest distance with a bucket; -1: `max_position_embeddings`."""
    position_buckets: int = 256
    """Number of buckets of distances, in each direction; beyond half of them a bucket holds several. -1: no buckets."""
    pos_att_type: tuple[Literal["p2c", "c2p"], ...] = ("p2c", "c2p")
    """Attention from content to position, from position to content, or both."""
    share_att_key: bool = True
    """Whether content and position use the same projections."""
    norm_rel_ebd: Literal["layer_norm", "none"] = "layer_norm"
    """Whether the embeddings of distances have a layer norm."""

    def build(self, vocabulary: Vocabulary, head: Head) -> PreTrainedModel:
        """Returns a randomly initialised model that computes distances without waiting for a GPU."""
        from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

        model = super().build(vocabulary, head)
        for part in model.modules():
            if isinstance(part, DebertaV2Encoder):
                part.__class__ = _encoder_without_waiting()
        return model


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
    width = torch.log(torch.tensor((largest - 1) / middle))  # () float32 on the host
    size = torch.where(distances.abs() < middle, middle - 1, distances.abs())
    far = torch.ceil(torch.log(size / middle) / width * (middle - 1)) + middle
    return torch.where(size <= middle, distances.to(far.dtype), far * distances.sign()).long()


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    """Registers `deberta_v2`."""
    return {"deberta_v2": DebertaV2}

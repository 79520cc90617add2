"""DeBERTa-v2 and v3 (He et al., 2021, arXiv:2006.03654 and 2111.09543): one set of projections for content and
position, relative positions in buckets that grow with distance.

v2 is this with the objective `masked_lm`, v3 with `replaced_token` and `"sharing": "disentangled"`. It has neither v2's
convolution parallel to the first layer, which would mix neighbouring documents, nor the enhanced mask decoder, which
Transformers does not have. Transformers does not have v3's head for replaced tokens either: the discriminator is a
token classifier.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from terakoya import hookimpl
from terakoya.components import Architecture
from terakoya.toolkit.architectures.disentangled import DisentangledEncoder


class DebertaV2(DisentangledEncoder):
    """Fields have the names of Transformers' `DebertaV2Config`; defaults are DeBERTa-v3-base's."""

    config_class = "DebertaV2Config"
    undeclared_arguments: ClassVar = frozenset({"position_buckets", "share_att_key", "norm_rel_ebd"})
    bf16_stream = True
    model_classes: ClassVar = {
        "masked": "DebertaV2ForMaskedLM", "discriminator": "DebertaV2ForTokenClassification", "body": "DebertaV2Model"
    }  # fmt: skip
    discriminator_head = ("dropout", "classifier")
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


@hookimpl
def register_architectures() -> dict[str, type[Architecture]]:
    return {"deberta_v2": DebertaV2}

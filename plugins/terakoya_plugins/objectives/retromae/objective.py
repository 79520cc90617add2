"""RetroMAE: pre-training of sentence and passage embeddings without labels.

Xiao et al., 2022 (arXiv:2205.12035): the encoder is a masked language model. A decoder of one layer reconstructs every
token of a document from the encoder's first hidden state, that of [CLS], and from a random part of the document's other
tokens, another part for each token. The decoder is too weak to do so without what [CLS] tells it, and is not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.changing_rates import Rate, largest_rate
from terakoya.toolkit.masking import IGNORED, mask_rows
from terakoya.toolkit.objectives.check_head import check_head
from terakoya.toolkit.random_keys import streams

if TYPE_CHECKING:
    import torch


class RetroMAE(Objective):
    """Settings of RetroMAE."""

    test_settings: ClassVar = {"decoder_weight": 0.5}
    phase_settings = frozenset({"mlm_probability", "whole_word_mask", "budgeted"})

    layout: Literal["packed", "lines"] = "packed"
    """The row layout. Each document, and each part of a document longer than a row, has a [CLS] of its own."""
    mlm_probability: Rate = 0.3
    """The share of tokens that the encoder predicts, between 0 and 1; or how it changes along the run, such as
    `{"start": 0.3, "end": 0.15}`, of which validation uses `end`."""
    whole_word_mask: bool = True
    """Whether all tokens of a word are predicted together."""
    budgeted: bool = True
    """Whether words are chosen so that nearly `mlm_probability` of each row is predicted, instead of independently.
    Every word is predicted with that probability either way."""
    hidden_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Of the other tokens of its document, the share that the decoder does not see when it reconstructs a token."""
    decoder_weight: PositiveFloat = 1.0
    """The weight of the decoder's loss, a mean over all tokens; that of the encoder's has the weight 1."""

    def row_layout(self) -> Layout:
        return Layout(kind=self.layout)

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Raises UserError where documents do not begin with a [CLS]."""
        if vocabulary.cls is None:
            raise UserError(
                "objective retromae: the store's vocabulary has no [CLS], whose hidden state would be the embedding of "
                "a document; use a tokenizer that has one"
            )

    def terms(self) -> Mapping[str, LossTerm]:
        return {
            "mlm_loss": LossTerm("masked", 1.0, bits="masked_bits"),
            "masked_accuracy": LossTerm("masked"),
            "decoder_loss": LossTerm("reconstructed", self.decoder_weight),
            "decoder_accuracy": LossTerm("reconstructed"),
        }

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Masks `rows` (B, T) by their keys.

        Adds `masked_positions` (K,), indices into the flattened rows, and `masked_labels` (K,), -100 in unused slots;
        `original_ids` and `decoder_labels` (B, T), -100 at special tokens and padding; and `decoder_keys` (B,), below
        2**32. Counts: masked, reconstructed, tokens.
        """
        _, batch = mask_rows(
            rows,
            vocabulary,
            objective="retromae",
            probability=self.mlm_probability,
            whole_words=self.whole_word_mask,
            budgeted=self.budgeted,
            replace=(0.8, 0.1),
        )
        ordinary = (rows.document_ids >= 0) & ~vocabulary.is_special.take(rows.tokens)
        original = rows.tokens.astype(np.int64)
        arrays = {
            **batch.arrays,
            "original_ids": original,
            "decoder_labels": np.where(ordinary, original, IGNORED),
            "decoder_keys": (streams(rows.keys, "retromae decoder") >> np.uint64(32)).astype(np.int64),
        }
        return Batch(arrays, {**batch.counts, "reconstructed": int(np.count_nonzero(ordinary))})

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        from terakoya_plugins.objectives.retromae.module import RetroMAEModule

        check_head("retromae", architecture, "masked")
        return RetroMAEModule(architecture, architecture.build(vocabulary, "masked"), hidden_share=self.hidden_share)

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """FLOPs of the encoder, whose vocabulary head runs at the predicted positions and once more at all of them, and
        of the decoder's matrices."""
        head_share = 1.0 + largest_rate(self.mlm_probability)
        parts: Any = module
        matrices = sum(each.numel() for name, each in parts.decoder.named_parameters() if name.endswith("_proj.weight"))
        return architecture.flops_per_token(parts.model, context=context, head_share=head_share) + 6.0 * matrices


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"retromae": RetroMAE}

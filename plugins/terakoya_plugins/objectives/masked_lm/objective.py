"""Masked language modelling with whole-word masking and optionally BERT's next-sentence prediction.

Devlin et al., 2019 (arXiv:1810.04805): 15 % of the tokens are predicted; of these 80 % are replaced by [MASK], 10 % by
a random token, and 10 % stay. The vocabulary head runs at the predicted positions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.changing_rates import Rate, largest_rate
from terakoya.toolkit.masking import mask_rows
from terakoya.toolkit.objectives.check_head import check_head

if TYPE_CHECKING:
    import torch

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class MaskedLM(Objective):
    """Settings of masked language modelling."""

    phase_settings = frozenset({
        "mlm_probability", "whole_word_mask", "budgeted", "replace_probability", "random_probability"
    })  # fmt: skip
    layout: Literal["packed", "stream", "lines", "pairs"] = "packed"
    """`packed`: several isolated documents in a row. `stream`: documents joined and split anywhere. `lines`: one line
    of a document in a row. `pairs`: two segments in a row, for next-sentence prediction."""
    mlm_probability: Rate = 0.15
    """The share of tokens that are predicted, between 0 and 1; or how it changes along the run, such as
    `{"start": 0.3, "end": 0.15}`, of which validation uses `end`."""
    whole_word_mask: bool = True
    """Whether all tokens of a word are predicted together."""
    budgeted: bool = True
    """Whether words are chosen so that nearly `mlm_probability` of each row is predicted, instead of independently.
    Every word is predicted with that probability either way."""
    replace_probability: Probability = 0.8
    """Of the predicted tokens, the share that [MASK] replaces."""
    random_probability: Probability = 0.1
    """Of the predicted tokens, the share that a random token replaces; the rest stays as it is."""
    next_sentence: bool = False
    """Whether the model also learns whether the second segment of a row follows the first; needs the layout `pairs`."""
    short_sequence_probability: Probability = 0.1
    """Of the documents of `pairs`, the share whose rows have a random shorter length."""
    random_next_probability: Probability = 0.5
    """Of the rows of `pairs`, the share whose second segment is from another document."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.replace_probability + self.random_probability > 1.0:
            raise ValueError("replace_probability and random_probability add up to more than 1")
        if self.next_sentence != (self.layout == "pairs"):
            raise ValueError(
                'next_sentence true and layout "pairs" need each other: '
                f'got next_sentence {str(self.next_sentence).lower()} with layout "{self.layout}"'
            )
        return self

    def row_layout(self) -> Layout:
        return Layout(
            kind=self.layout,
            short_sequence_probability=self.short_sequence_probability,
            random_next_probability=self.random_next_probability,
        )

    def terms(self) -> Mapping[str, LossTerm]:
        terms = {"mlm_loss": LossTerm("masked", 1.0, bits="masked_bits"), "masked_accuracy": LossTerm("masked")}
        if self.next_sentence:
            terms |= {"nsp_loss": LossTerm("rows", 1.0), "nsp_accuracy": LossTerm("rows")}
        return terms

    def sums_by_position(self) -> bool:
        return not self.next_sentence

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Masks `rows` (B, T) by their keys.

        Adds `masked_positions` (K,), indices into the flattened rows, and `masked_labels` (K,), -100 in unused slots;
        with pairs `token_type_ids` (B, T) and `next_sentence_labels` (B,). Counts: masked, rows, tokens.
        """
        _, batch = mask_rows(
            rows,
            vocabulary,
            objective="masked_lm",
            probability=self.mlm_probability,
            whole_words=self.whole_word_mask,
            budgeted=self.budgeted,
            replace=(self.replace_probability, self.random_probability),
        )
        arrays, counts = dict(batch.arrays), {**batch.counts, "rows": len(rows.tokens)}
        if self.next_sentence:
            assert rows.token_type_ids is not None and rows.next_sentence is not None
            arrays["token_type_ids"] = rows.token_type_ids.astype(np.int64)
            arrays["next_sentence_labels"] = rows.next_sentence.astype(np.int64)
        return Batch(arrays=arrays, counts=counts)

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        from terakoya_plugins.objectives.masked_lm.module import MaskedLMModule

        head: Literal["masked", "pretraining"] = "pretraining" if self.next_sentence else "masked"
        check_head("masked_lm", architecture, head)
        return MaskedLMModule(architecture, architecture.build(vocabulary, head), next_sentence=self.next_sentence)

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """FLOPs per token; the vocabulary head runs at the predicted positions only."""
        return architecture.flops_per_token(
            module.model, context=context, head_share=largest_rate(self.mlm_probability)
        )


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"masked_lm": MaskedLM}

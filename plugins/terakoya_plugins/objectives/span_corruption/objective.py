"""Span corruption: sentinel tokens replace spans of the text, and a decoder predicts the spans.

Raffel et al., 2020 (T5, arXiv:1910.10683): 15 % of the tokens, in spans of 3 on average. As in the original's code the
target is each sentinel with the tokens it replaces, then the end token; spans may be anywhere, as with its
`random_roll`. The end token is the vocabulary's [SEP], or the `</s>` of a tokenizer of T5, whose rows have no [CLS].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.objectives.check_head import check_head

if TYPE_CHECKING:
    import torch


class SpanCorruption(Objective):
    """Settings of span corruption."""

    test_settings: ClassVar[Mapping[str, Any]] = {"noise_density": 0.3}

    layout: Literal["packed", "stream", "lines"] = "packed"
    """`packed`: several isolated documents in a row. `stream`: documents joined and split anywhere. `lines`: one line
    of a document in a row."""
    noise_density: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """The share of a document's tokens that are replaced."""
    mean_noise_span_length: Annotated[float, Field(ge=1.0)] = 3.0
    """Average length of a span. Unit: tokens."""
    sentinels: tuple[int, ...] | None = None
    """The ids that replace the first span of a document, the second, ...; by default those of `<extra_id_0>`,
    `<extra_id_1>`, ..., or of unused slots where the vocabulary has none of these."""

    def row_layout(self) -> Layout:
        return Layout(kind=self.layout, framing="encoder_decoder")

    def terms(self) -> Mapping[str, LossTerm]:
        """`span_loss` and `target_accuracy` over the decoder's target tokens, including sentinels and end tokens;
        `replaced_loss` over those that are text, in evaluation alone."""
        return {
            "span_loss": LossTerm("targets", 1.0),
            "target_accuracy": LossTerm("targets"),
            "replaced_loss": LossTerm("replaced", bits="masked_bits"),
        }

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Raises UserError where a row may need more sentinels than there are."""
        from terakoya_plugins.objectives.span_corruption.rows import noise_and_spans

        available = len(self._sentinels(vocabulary))
        body = sequence_length - (1 if vocabulary.cls is None else 2)
        _, needed = noise_and_spans(np.array([body]), self.noise_density, self.mean_noise_span_length)
        if available < needed[0]:
            raise UserError(
                f"objective span_corruption: a row of {sequence_length} tokens needs up to {needed[0]} sentinel "
                f"tokens, one for each span, but there are {available}. Train the tokenizer with num_unused_tokens "
                f"{needed[0]} or more (mecab_wordpiece, mecab_character), or with as many of <extra_id_0>, "
                "<extra_id_1>, ... as control_symbols (sentencepiece) or additional_special_tokens (byte_bpe), name "
                "special tokens that never occur in text by objective.sentinels, reduce data.sequence_length, or raise "
                "objective.mean_noise_span_length"
            )

    def _sentinels(self, vocabulary: Vocabulary) -> np.ndarray:
        """The ids (n,) int64 of the sentinels, in the order of the spans."""
        v = vocabulary
        roles = {v.pad, v.unk, v.cls, v.sep, v.mask, v.bos, v.eos}
        if self.sentinels is None:
            default = sorted(set(v.special) - roles) if v.sentinels is None else v.sentinels
            return np.array(default, np.int64)
        for number in self.sentinels:
            if number not in v.special or number in roles:
                raise UserError(
                    f"objective.sentinels: expected ids of special tokens without another meaning, got {number}, which "
                    "may occur in text or in rows"
                )
        if len(set(self.sentinels)) != len(self.sentinels):
            raise UserError("objective.sentinels: expected each id once")
        return np.array(self.sentinels, np.int64)

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Corrupts `rows` (B, T) by their keys, each document separately.

        In `input_ids` (B, T) the replaced tokens are removed and padding follows at the end. Adds `decoder_input_ids`,
        `decoder_document_ids` and `labels`, -100 at padding, (B, S), where S is as large as the batch needs, a multiple
        of 8. Counts: targets; replaced, those of them that are text; tokens.
        """
        from terakoya_plugins.objectives.span_corruption.rows import Noising, corrupt

        end = vocabulary.encoder_end
        assert vocabulary.pad is not None and end is not None, "the rows require them"
        sentinels = self._sentinels(vocabulary)
        noising = Noising(self.noise_density, self.mean_noise_span_length, sentinels, pad=vocabulary.pad, end=end)
        arrays = corrupt(rows, ~vocabulary.is_special.take(rows.tokens), noising)
        targets = arrays["labels"][arrays["labels"] >= 0]
        counts = {
            "targets": len(targets),
            "replaced": int(np.count_nonzero(~vocabulary.is_special[targets])),
            "tokens": int(np.count_nonzero(rows.document_ids >= 0)),
        }
        return Batch(arrays=arrays, counts=counts)

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        from terakoya_plugins.objectives.span_corruption.module import SpanCorruptionModule

        check_head("span_corruption", architecture, "seq2seq")
        return SpanCorruptionModule(architecture, architecture.build(vocabulary, "seq2seq"), vocabulary.special)

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """FLOPs per token; the head runs at the targets only: the replaced tokens, and a sentinel for each span."""
        share = self.noise_density * (1 + 1 / self.mean_noise_span_length)
        return architecture.flops_per_token(module.model, context=context, head_share=share)


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"span_corruption": SpanCorruption}

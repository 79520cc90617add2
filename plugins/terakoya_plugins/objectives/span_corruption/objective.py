"""Span corruption: spans of the text give way to sentinel tokens, and a decoder writes what stood there.

Raffel et al., 2020 (T5, arXiv:1910.10683): 15 % of the tokens, in spans of 3 on average. As in the original's code the
target is each sentinel with the tokens it stands for, then the end; spans may lie anywhere, as with its `random_roll`.
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

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class SpanCorruption(Objective):
    """Settings of span corruption."""

    test_settings: ClassVar[Mapping[str, Any]] = {"noise_density": 0.3}

    layout: Literal["packed", "stream", "lines"] = "packed"
    noise_density: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """The share of a document's tokens that give way."""
    mean_noise_span_length: Annotated[float, Field(ge=1.0)] = 3.0
    """Tokens of a span, on average."""
    sentinels: tuple[int, ...] | None = None
    """The ids that stand for the first span of a document, its second, ...; where not given, the vocabulary's special
    tokens that have no other meaning (unused slots, `<extra_id_0>`), by id."""

    def row_layout(self) -> Layout:
        """Rows as `layout` says."""
        return Layout(kind=self.layout)

    def terms(self) -> Mapping[str, LossTerm]:
        """Both over the tokens that the decoder writes, sentinels and ends included."""
        return {"span_loss": LossTerm("targets", 1.0), "target_accuracy": LossTerm("targets")}

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Raises UserError where a row may need more sentinels than there are."""
        from terakoya_plugins.objectives.span_corruption.rows import amounts

        there = len(self._sentinels(vocabulary))
        _, needed = amounts(np.array([sequence_length - 2]), self.noise_density, self.mean_noise_span_length)
        if there < needed[0]:
            raise UserError(
                f"objective span_corruption: a row of {sequence_length} tokens takes up to {needed[0]} sentinel "
                f"tokens, one for each span, but there are {there}. Train the tokenizer with num_unused_tokens "
                f"{needed[0]} or more (or another with as many special tokens that text never holds), shorten "
                "data.sequence_length, or lengthen objective.mean_noise_span_length"
            )

    def _sentinels(self, vocabulary: Vocabulary) -> np.ndarray:
        """The ids (n,) int64, in the order in which spans take them."""
        v = vocabulary
        roles = {v.pad, v.unk, v.cls, v.sep, v.mask, v.bos, v.eos}
        if self.sentinels is None:
            return np.array(sorted(set(v.special) - roles), np.int64)
        for number in self.sentinels:
            if number not in v.special or number in roles:
                raise UserError(
                    f"objective.sentinels: expected ids of special tokens without another meaning, got {number}; text "
                    "may hold it, or rows do"
                )
        if len(set(self.sentinels)) != len(self.sentinels):
            raise UserError("objective.sentinels: expected each id once")
        return np.array(self.sentinels, np.int64)

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Corrupts `rows` (B, T) by their keys, each document for itself.

        `input_ids` (B, T) are shorter by what is left out, padding behind. Adds `decoder_input_ids`,
        `decoder_document_ids` and `labels`, -100 at padding, (B, S): S is what the batch needs, in eights. Counts:
        targets, tokens.
        """
        from terakoya_plugins.objectives.span_corruption.rows import corrupt

        assert vocabulary.pad is not None and vocabulary.sep is not None, "rows have them"
        arrays = corrupt(
            rows,
            rows.document_ids >= 0,
            ~vocabulary.is_special.take(rows.tokens),
            self._sentinels(vocabulary),
            density=self.noise_density,
            span_length=self.mean_noise_span_length,
            pad=vocabulary.pad,
            end=vocabulary.sep,
        )
        counts = {
            "targets": int(np.count_nonzero(arrays["labels"] >= 0)),
            "tokens": int(np.count_nonzero(rows.document_ids >= 0)),
        }
        return Batch(arrays=arrays, counts=counts)

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """The root module over a freshly initialised model."""
        from terakoya_plugins.objectives.span_corruption.module import SpanCorruptionModule

        if "seq2seq" not in architecture.heads:
            raise UserError(
                f"objective span_corruption: architecture {type(architecture).__name__} has no head 'seq2seq', only "
                f"{sorted(architecture.heads)}"
            )
        return SpanCorruptionModule(architecture, architecture.build(vocabulary, "seq2seq"))

    def exports(self, module: torch.nn.Module) -> Mapping[str, PreTrainedModel]:
        """One model, in the folder itself."""
        return {"": module.model}

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """The head runs at the targets only: what is left out, and a sentinel for each span."""
        share = self.noise_density * (1 + 1 / self.mean_noise_span_length)
        return architecture.flops_per_token(module.model, context=context, head_share=share)


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    """Offers `span_corruption`."""
    return {"span_corruption": SpanCorruption}

"""Contrastive learning of embeddings without labels, with all other documents of the step as negatives.

The two views of a document are two forward passes with other dropout (SimCSE: Gao, Yao and Chen, 2021,
arXiv:2104.08821), or its two halves, cut at a random place (Giorgi et al., 2021, arXiv:2006.03659, and Izacard et al.,
2022, arXiv:2112.09118, take two spans). A softmax over cosines must choose, of all second views, that of the same
document.

Letters: B rows, T positions, D documents of a row, E examples, H size of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat

from terakoya import hookimpl
from terakoya.components import Architecture, Batch, LossTerm, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.toolkit.objectives.check_head import check_head
from terakoya.toolkit.random_keys import integers_below, numbers, streams

if TYPE_CHECKING:
    import torch

LEAST_TOKENS = 8
"""Shorter documents are no examples: they are in the row, and nothing is learned from them."""


class Contrastive(Objective):
    """Settings of contrastive learning."""

    compares_examples: ClassVar[bool] = True

    layout: Literal["packed", "lines"] = "packed"
    """The row layout. An example is a document, or a part of one that is longer than a row; with `lines` a line."""
    views: Literal["halves", "dropout"] = "halves"
    """What the two views of a document are: `halves`, its two parts, cut at a random place between a third and two
    thirds; `dropout`, the document twice with other dropout (SimCSE), which costs two passes. In validation dropout is
    off: both views of `dropout` are equal, the accuracy is 1, and the loss says only how far apart documents are, so
    `best_checkpoint` and `early_stopping` should follow neither; score the embeddings with `evaluate --tasks`."""
    pooling: Literal["mean", "cls"] = "mean"
    """The embedding of a view: the mean of its last hidden states, or the first of them, that of [CLS]."""
    temperature: PositiveFloat = 0.05
    """What cosines are divided by before the softmax."""

    def row_layout(self) -> Layout:
        return Layout(kind=self.layout)

    def check(self, vocabulary: Vocabulary, *, sequence_length: int) -> None:
        """Raises UserError where documents do not begin with a [CLS] and end with a [SEP]."""
        if vocabulary.cls is None or vocabulary.sep is None:
            raise UserError(
                "objective contrastive: the store's vocabulary has no [CLS] and [SEP], between which each view stands; "
                "use a tokenizer that has them"
            )

    def terms(self) -> Mapping[str, LossTerm]:
        return {"contrastive_loss": LossTerm("examples", 1.0), "contrastive_accuracy": LossTerm("examples")}

    def collate(self, rows: Rows, vocabulary: Vocabulary) -> Batch:
        """Returns `rows` (B, T) with `examples` (B, D) bool: which of the first documents of a row are examples.

        With the views `halves` an example is documents 2 d and 2 d + 1: the first ends with [SEP], the second begins
        with [CLS]. Counts: examples, tokens.
        """
        documents = rows.document_ids.astype(np.int64)
        positions, tokens = rows.position_ids.astype(np.int64), rows.tokens.astype(np.int64)
        slots = 1 << max(0, int(documents.max(initial=0))).bit_length()
        lengths = np.stack([np.count_nonzero(documents == each, axis=1) for each in range(slots)], axis=1)
        examples = lengths >= LEAST_TOKENS
        if self.views == "halves":
            documents, positions, tokens = self._cut(rows, vocabulary, lengths, examples)
        arrays = {"input_ids": tokens, "position_ids": positions, "document_ids": documents, "examples": examples}
        counts = {"examples": int(np.count_nonzero(examples)), "tokens": int(np.count_nonzero(documents >= 0))}
        return Batch(arrays, counts)

    def _cut(
        self, rows: Rows, vocabulary: Vocabulary, lengths: np.ndarray, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns documents, positions and tokens, (B, T) int64 each, with examples cut into two documents."""
        assert vocabulary.cls is not None and vocabulary.sep is not None
        slots = lengths.shape[1]
        drawn = numbers(streams(rows.keys, "halves")[:, None], np.arange(slots)[None])
        third = np.maximum(lengths // 3, 1)
        cuts = third + integers_below(drawn, third + 1).astype(np.int64)  # (B, D), the length of the first half
        documents, positions = rows.document_ids.astype(np.int64), rows.position_ids.astype(np.int64)
        tokens, real = rows.tokens.astype(np.int64), rows.document_ids >= 0
        of_token = np.where(real, documents, 0)
        cut = np.take_along_axis(np.where(examples, cuts, np.iinfo(np.int64).max), of_token, axis=1)
        second = real & (positions >= cut)
        tokens[real & (positions == cut - 1)] = vocabulary.sep
        tokens[real & (positions == cut)] = vocabulary.cls
        return np.where(real, 2 * documents + second, -1), np.where(second, positions - cut, positions), tokens

    def build(self, architecture: Architecture, vocabulary: Vocabulary) -> torch.nn.Module:
        """Returns the root module with a randomly initialised encoder, whose vocabulary head is not trained."""
        from terakoya_plugins.objectives.contrastive.module import ContrastiveModule

        check_head("contrastive", architecture, "masked")
        return ContrastiveModule(
            architecture,
            architecture.build(vocabulary, "masked"),
            halves=self.views == "halves",
            pooling=self.pooling,
            compare=self.compare,
        )

    def compare(self, embeddings: torch.Tensor, real: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The cross entropy of choosing, for each first view, the second view of its document, and whether that is the
        likeliest."""
        import torch

        first, second = torch.nn.functional.normalize(embeddings.float(), dim=-1).unbind(1)
        scores = (first @ second.T / self.temperature).masked_fill(~real[None], -1e9)
        own = torch.arange(len(scores), device=scores.device)
        losses = torch.nn.functional.cross_entropy(scores, own, reduction="none")
        right = (scores.argmax(1) == own) & real
        return {"contrastive_loss": losses.where(real, 0.0), "contrastive_accuracy": right.float()}

    def flops_per_token(self, module: torch.nn.Module, architecture: Architecture, *, context: float) -> float:
        """FLOPs of the encoder's passes with gradients, without a head: one for each view that is a pass of its own."""
        (model,) = self.exports(module).values()
        passes = 1 if self.views == "halves" else 2
        return passes * architecture.flops_per_token(model, context=context, head_share=0.0)


@hookimpl
def register_objectives() -> dict[str, type[Objective]]:
    return {"contrastive": Contrastive}

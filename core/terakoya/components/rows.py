"""Layouts of rows, and the arrays of a batch of rows. A row is one training sequence.

Letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from terakoya.components.record_format import WholeDocuments

WIDTH_STEP = 8
"""Rows of `lines` and `pairs` are a multiple of it wide, or as wide as the sequence length."""


@dataclass(frozen=True)
class Layout:
    """How rows are cut.

    For encoders (`framing` encoder, and encoder_decoder, where [CLS] is left out and the end-of-sequence token stands
    for [SEP] if the vocabulary does not have these, as T5's):
    `packed`: [CLS] document [SEP] [CLS] document [SEP] ..., best-fit, documents masked from each other.
    `stream`: [CLS] documents joined by [SEP] [SEP], cut anywhere; a row counts as one document.
    `lines`: [CLS] line [SEP], one line a row, longer lines are cut; needs a store of lines.
    `pairs`: [CLS] A [SEP] B [SEP] for next-sentence prediction; needs a store of lines.

    For causal models, where the label of each token is the next one:
    `packed`: documents, best-fit, masked from each other; the label of the last token is the end of the document.
    `stream`: documents, each followed by its end token, cut anywhere; a row counts as one document.
    `megatron`: as `stream`, with documents and rows in the order in which Megatron-LM draws them.
    `padded`: one document a row, which is `whole`. `packed` puts several of them into a row.
    """

    kind: Literal["packed", "stream", "lines", "pairs", "megatron", "padded"]
    short_sequence_probability: float = 0.1
    """For `pairs`: how often the pairs of a document have a random shorter target length (the original BERT's 0.1)."""
    random_next_probability: float = 0.5
    """For `pairs`: how often B comes from another document (the original BERT's 0.5)."""
    framing: Literal["encoder", "encoder_decoder", "causal"] = "encoder"
    bos: bool = False
    """Causal: whether each document begins with the vocabulary's beginning-of-sequence token."""
    append_eos: bool = True
    """Causal: whether a document without a stored end token gets one."""
    eod_mask_loss: bool = False
    """Causal: whether an end-of-document token in the input has no label (Megatron-LM's --eod-mask-loss)."""
    samples: int | None = None
    """For `megatron`: the rows of the whole run, from which Megatron-LM computes its epochs; None: one epoch after
    another."""
    whole: WholeDocuments | None = None
    """Causal, `packed` or `padded`: how documents that stay whole, such as conversations, are used; the store has all
    their special tokens."""

    @property
    def varies_in_width(self) -> bool:
        """Whether rows, or the targets of a decoder beside an encoder, are only as wide as the longest of a batch."""
        return self.kind in ("lines", "pairs") or self.framing == "encoder_decoder"


@dataclass(frozen=True)
class Rows:
    """A batch of rows. T is the sequence length; for `lines` and `pairs` the longest row of the batch, rounded up to a
    multiple of `WIDTH_STEP` and at most the sequence length.

    Attributes:
        tokens: (B, T) int32, the padding id at padding.
        document_ids: (B, T) int32, counted from 0 in each row, -1 at padding.
        position_ids: (B, T) int32, from 0 in each document; 0 at padding.
        word_starts: (B, T) bool, True where a word starts according to the store, False at special tokens; None where
            the store does not know words, and in causal rows.
        keys: (B,) uint64, one random key a row: see `toolkit.random_keys`.
        token_type_ids: (B, T) int32, 0 for [CLS] A [SEP], 1 for B [SEP]; None except for `pairs`.
        next_sentence: (B,) int8, 0 where B follows A, 1 where it is random, -100 in a blank row; None except for
            `pairs`.
        labels: (B, T) int32, the next token, -100 where there is no label; None except in causal rows.
        progress: the share of the run that is finished before the step of these rows, 0 to 1: rows taken over all rows.
            It is 1 outside of training steps, so that validation does not depend on when it happens.
    """

    tokens: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray
    word_starts: np.ndarray | None
    keys: np.ndarray
    token_type_ids: np.ndarray | None = None
    next_sentence: np.ndarray | None = None
    labels: np.ndarray | None = None
    progress: float = 1.0

    def __len__(self) -> int:
        return len(self.tokens)


def group_indices(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for groups of `counts` (B,) items, the group of each item and its number in it, (sum,) int64 each."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)

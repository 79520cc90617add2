"""How rows are cut from a token store, and the arrays that come out.

Letters: B rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Conversations:
    """What is learnt of a store of conversations, each of which stays whole in one row.

    `loss_on`: the tokens that are labels: those of all answers, of the last answer in the row, or all.
    `too_long`: what becomes of one with more tokens than a row: its end is cut off (and it is left out if no answer is
    left), or it is left out.
    """

    loss_on: Literal["answers", "last_answer", "all"] = "answers"
    too_long: Literal["truncate", "drop"] = "truncate"


@dataclass(frozen=True)
class Layout:
    """How rows are cut.

    For encoders (`framing`):
    `packed`: [CLS] document [SEP] [CLS] document [SEP] ..., best-fit, documents isolated from each other.
    `stream`: [CLS] documents joined by [SEP] [SEP], cut anywhere; a row counts as one document.
    `lines`: [CLS] line [SEP], one line a row, longer ones cut; needs a store of lines.
    `pairs`: [CLS] A [SEP] B [SEP] for next-sentence prediction; needs a store of lines.

    For causal models, where each token has the next one as its label:
    `packed`: documents, best-fit, isolated from each other; the last token of each has its end as its label.
    `stream`: documents each followed by its end, cut anywhere; a row counts as one document.
    `megatron`: the same, documents and rows in the order in which Megatron-LM draws them.
    `padded`: one conversation a row; needs a store of them, of which `packed` takes several a row.
    """

    kind: Literal["packed", "stream", "lines", "pairs", "megatron", "padded"]
    short_sequence_probability: float = 0.1
    """Of `pairs`: how often a document's pairs aim at a random shorter length (the original BERT's 0.1)."""
    random_next_probability: float = 0.5
    """Of `pairs`: how often B comes from another document (the original BERT's 0.5)."""
    framing: Literal["encoder", "causal"] = "encoder"
    bos: bool = False
    """Causal: whether each document begins with the vocabulary's beginning-of-sequence token."""
    append_eos: bool = True
    """Causal: whether a document that the store has no end stored of is given one."""
    eod_mask_loss: bool = False
    """Causal: whether an end-of-document token, seen, has nothing to predict (Megatron-LM's --eod-mask-loss)."""
    samples: int | None = None
    """Of `megatron`: the rows that the whole run takes, from which Megatron-LM works out its epochs; None: it is one
    epoch after another."""
    conversations: Conversations | None = None
    """Causal, `packed` or `padded`: what is learnt of a store of conversations, whose templates end each of them."""


@dataclass(frozen=True)
class Rows:
    """A batch of rows. T is the sequence length; for `lines` and `pairs` the longest row of the batch, rounded up to a
    multiple of 8 and at most the sequence length.

    Attributes:
        tokens: (B, T) int32, the padding id where empty.
        document_ids: (B, T) int32, counted from 0 in each row, -1 at padding.
        position_ids: (B, T) int32, from 0 in each document; 0 at padding.
        word_starts: (B, T) bool, True where the store says that a word starts, False at special tokens; None where
            the store does not know words, and in causal rows.
        keys: (B,) uint64.
        token_type_ids: (B, T) int32, 0 for [CLS] A [SEP], 1 for B [SEP]; None except for `pairs`.
        next_sentence: (B,) int8, 0 where B follows A, 1 where it is random, -100 in a blank row; None except for
            `pairs`.
        labels: (B, T) int32, the token that follows, -100 where there is nothing to predict; None except in causal
            rows.
    """

    tokens: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray
    word_starts: np.ndarray | None
    keys: np.ndarray
    token_type_ids: np.ndarray | None = None
    next_sentence: np.ndarray | None = None
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def ranges(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (B,): which of them each item belongs to and its number there, (sum,) int64 each."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)

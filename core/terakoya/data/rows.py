"""Rows: fixed-length training examples cut from a token store, each with a key that decides all its draws.

Letters: B rows, T tokens of a row.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from terakoya.data.framing import Segments, frame
from terakoya.data.packing import Plan, stored_plan
from terakoya.data.pairs import PairPlan, plan_pairs, truncate
from terakoya.data.row_order import RowOrder
from terakoya.data.spans import Spans
from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.data.store import TokenStore

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class Layout:
    """How rows are cut.

    `packed`: [CLS] document [SEP] [CLS] document [SEP] ..., best-fit, documents isolated from each other.
    `stream`: [CLS] documents joined by [SEP] [SEP], cut anywhere; a row counts as one document.
    `lines`: [CLS] line [SEP], one line a row, longer ones cut; needs a store of lines.
    `pairs`: [CLS] A [SEP] B [SEP] for next-sentence prediction; needs a store of lines.
    """

    kind: Literal["packed", "stream", "lines", "pairs"]
    short_sequence_probability: float = 0.1
    """Of `pairs`: how often a document's pairs aim at a random shorter length (the original BERT's 0.1)."""
    random_next_probability: float = 0.5
    """Of `pairs`: how often B comes from another document (the original BERT's 0.5)."""


@dataclass(frozen=True)
class Rows:
    """A batch of rows. T is the sequence length for `packed` and `stream`; for `lines` and `pairs` the longest row of
    the batch, rounded up to a multiple of 8 and at most the sequence length.

    Attributes:
        tokens: (B, T) int32, the padding id where empty.
        document_ids: (B, T) int32, counted from 0 in each row, -1 at padding.
        position_ids: (B, T) int32, from 0 in each document; 0 at padding.
        word_starts: (B, T) bool, True where the store says that a word starts, False at special tokens; None where
            the store does not know words.
        keys: (B,) uint64.
        token_type_ids: (B, T) int32, 0 for [CLS] A [SEP], 1 for B [SEP]; None except for `pairs`.
        next_sentence: (B,) int8, 0 where B follows A, 1 where it is random, -100 in a blank row; None except for
            `pairs`.
    """

    tokens: np.ndarray
    document_ids: np.ndarray
    position_ids: np.ndarray
    word_starts: np.ndarray | None
    keys: np.ndarray
    token_type_ids: np.ndarray | None = None
    next_sentence: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class RowSource:
    """The rows of one store in one layout. An epoch visits every row of the plan once, in keyed order."""

    def __init__(
        self,
        store: TokenStore,
        layout: Layout,
        *,
        sequence_length: int,
        seed: int,
        store_index: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Opens the plan of `store`, building it first where there is none.

        `store_index` is the store's number in its blend, a part of every key. Without `shuffle` rows come in plan
        order, as validation wants them. Raises UserError where the store does not fit the layout.
        """
        self.store = store
        self.layout = layout
        self.sequence_length = sequence_length
        self.seed = seed
        self.store_index = store_index
        self.shuffle = shuffle
        self.vocabulary: Vocabulary = store.facts.vocabulary
        if store.facts.tokens == 0:
            raise UserError(f"{store.folder}: expected a store with tokens, got an empty one; prepare it again")
        self._tokens = np.asarray(store.tokens)
        self._spans = Spans(store)
        self._check()
        self._words: np.ndarray | None = None
        if store.facts.word_starts:
            self._words = np.asarray(np.memmap(store.folder / "tokens.words", np.uint8, "r"))
        self._pairs: OrderedDict[int, PairPlan] = OrderedDict()
        self._plan: Plan | None = None
        if layout.kind in ("packed", "lines"):
            self._plan = stored_plan(
                store.folder,
                store.fingerprint,
                kind=layout.kind,
                sequence_length=sequence_length,
                framing=2,
                count=store.facts.documents if layout.kind == "packed" else store.facts.sequences,
                spans=self._spans.documents if layout.kind == "packed" else self._spans.lines,
            )
        self._order = RowOrder(self._count, seed=seed, store_index=store_index, shuffle=shuffle)
        self._rows = self._count(0)
        if self._rows == 0:
            raise UserError(
                f"{store.folder}: expected text for at least one row of layout {layout.kind}, got empty documents; "
                "prepare it again"
            )

    def __len__(self) -> int:
        """Rows in an epoch. Of pairs, epoch 0's number counts for all epochs."""
        return self._rows

    def load(self, epoch: int, positions: np.ndarray) -> Rows:
        """The rows at `positions` (B,), each in [0, len(self)), of `epoch`. Pure: no state decides the result."""
        rows, keys = self._order.at(epoch, np.asarray(positions, np.int64))
        next_sentence = None
        if self.layout.kind == "pairs":
            plan = self._epoch_pairs(epoch)
            rows = rows % len(plan)
            segments = self._pair_segments(plan, rows, keys)
            next_sentence = plan.random[rows]
        elif self.layout.kind == "stream":
            segments = self._stream_segments(rows)
        else:
            segments = self._plan_segments(rows)
        return self._assemble(segments, keys, next_sentence)

    def blank(self) -> Rows:
        """One row of [CLS] [SEP] and nothing to learn: what an empty slot of a micro-step runs through the model."""
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        paired = self.layout.kind == "pairs"
        segments = Segments(zero, zero, zero, one, one, zero, zero if paired else None)
        return self._assemble(segments, np.zeros(1, np.uint64), np.full(1, -100, np.int8) if paired else None)

    # ------------------------------------------------------------------------------------------- what a row holds

    def _plan_segments(self, rows: np.ndarray) -> Segments:
        """The pieces of plan rows, each a document of its own framed by [CLS] and [SEP]."""
        assert self._plan is not None
        first = self._plan.rows[rows]
        counts = self._plan.rows[rows + 1] - first
        row, ordinal = _ranges(counts)
        pieces = first[row] + ordinal
        ones = np.ones(len(row), np.int64)
        return Segments(
            row, self._plan.starts[pieces], self._plan.lengths[pieces].astype(np.int64), ones, ones, ordinal
        )

    def _stream_segments(self, rows: np.ndarray) -> Segments:
        """Rows of the stream in which each document is followed by one separator."""
        body = self.sequence_length - 2
        begin = rows * body
        end = np.minimum(begin + body, self._spans.stream_length)
        first = self._spans.document_at(begin)
        row, ordinal = _ranges(self._spans.document_at(end - 1) - first + 1)
        document = first[row] + ordinal
        start, stop = self._spans.stream_start(document), self._spans.stream_start(document + 1)
        separators = (stop > start).astype(np.int64)  # the last place of a document's part of the stream
        skipped = np.maximum(begin[row] - start, 0)
        text_stop = np.minimum(stop - separators, end[row])
        length = np.maximum(text_stop - start - skipped, 0)
        trail = separators * (stop <= end[row])
        is_last = np.append(row[1:] != row[:-1], True)
        return Segments(
            row,
            self._spans.document_start(document) + skipped,
            length,
            (ordinal == 0).astype(np.int64),
            trail + is_last,
            np.zeros(len(row), np.int64),
        )

    def _pair_segments(self, plan: PairPlan, rows: np.ndarray, keys: np.ndarray) -> Segments:
        """[CLS] A [SEP] B [SEP], cut down to the sequence length."""
        starts, lengths = truncate(plan.starts[rows], plan.lengths[rows], self.sequence_length - 3, keys)
        side = np.tile(np.arange(2), len(rows))
        return Segments(
            np.repeat(np.arange(len(rows)), 2),
            starts.ravel(),
            lengths.ravel(),
            1 - side,
            np.ones(2 * len(rows), np.int64),
            np.zeros(2 * len(rows), np.int64),
            side,
        )

    def _assemble(self, segments: Segments, keys: np.ndarray, next_sentence: np.ndarray | None) -> Rows:
        """The arrays of a batch, as wide as the layout wants them."""
        width = self.sequence_length
        if self.layout.kind in ("lines", "pairs"):
            width = min(width, -(-int(segments.used(len(keys)).max()) // 8) * 8)
        framed = frame(
            segments,
            (len(keys), width),
            self._tokens,
            self._words,
            pad=self._id("pad"),
            cls=self._id("cls"),
            sep=self._id("sep"),
            restart=self.layout.kind in ("packed", "lines"),
        )
        return Rows(
            framed.tokens,
            framed.document_ids,
            framed.position_ids,
            framed.word_starts,
            keys,
            framed.token_type_ids,
            next_sentence,
        )

    # ---------------------------------------------------------------------------------------- what the store holds

    def _check(self) -> None:
        """Raises UserError where the layout cannot be cut from the store."""
        where = f"{self.store.folder}: layout {self.layout.kind}"
        for name in ("cls", "sep", "pad"):
            if getattr(self.vocabulary, name) is None:
                raise UserError(
                    f"{where}: expected a vocabulary with a {name} token, got none; use a tokenizer that has one (of "
                    "kind sentencepiece: trained with --special-tokens bert)"
                )
        if self.layout.kind in ("lines", "pairs") and self.store.facts.unit != "line":
            raise UserError(
                f'{where}: expected a store of lines, got unit "{self.store.facts.unit}"; '
                "prepare the corpus with --unit line"
            )
        shortest = 5 if self.layout.kind == "pairs" else 3
        if self.sequence_length < shortest:
            raise UserError(f"{where}: expected data.sequence_length >= {shortest}, got {self.sequence_length}")
        if self.layout.kind == "pairs" and int(np.sum(np.diff(self.store.documents) > 0)) < 2:
            raise UserError(
                f"{where}: expected at least two documents, got fewer; a random next sentence needs another"
            )

    def _count(self, epoch: int) -> int:
        """Rows of `epoch`. Pairs alone differ in number from epoch to epoch."""
        if self.layout.kind == "pairs":
            return len(self._epoch_pairs(epoch))
        if self.layout.kind == "stream":
            return -(-self._spans.stream_length // (self.sequence_length - 2))
        assert self._plan is not None
        return len(self._plan)

    def _id(self, name: Literal["pad", "cls", "sep"]) -> int:
        number = getattr(self.vocabulary, name)
        assert isinstance(number, int)
        return number

    def _epoch_pairs(self, epoch: int) -> PairPlan:
        """The pairs of `epoch`, kept for the last two epochs asked for."""
        if epoch in self._pairs:
            self._pairs.move_to_end(epoch)
            return self._pairs[epoch]
        starts, lengths = self._spans.lines(0, self.store.facts.sequences)
        plan = plan_pairs(
            starts,
            starts + lengths,
            np.asarray(self.store.documents),
            budget=self.sequence_length - 3,
            short_sequence_probability=self.layout.short_sequence_probability,
            random_next_probability=self.layout.random_next_probability,
            seed=self.seed,
            epoch=epoch,
            store=self.store_index,
        )
        if epoch:
            logger.info(
                "%s: epoch %d makes %d pairs, of which an epoch of %d rows is taken",
                self.store.folder,
                epoch,
                len(plan),
                self._rows,
            )
        self._pairs[epoch] = plan
        while len(self._pairs) > 2:
            self._pairs.popitem(last=False)
        return plan


def _ranges(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (B,): which of them each item belongs to and its number there, (sum,) int64 each."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)

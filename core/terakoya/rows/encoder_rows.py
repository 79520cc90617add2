"""Rows for encoders and encoder-decoders: documents, lines or pairs with the vocabulary's [CLS] and [SEP].

Letters: B rows, T tokens of a row.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import numpy as np

from terakoya.components.rows import WIDTH_STEP, Layout, Rows, group_indices
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.rows.next_sentence_pairs import PairPlan, plan_pairs, truncate_pairs
from terakoya.rows.packing import Plan, PlanKind, load_or_build_plan
from terakoya.rows.row_assembly import RowSegments, assemble_rows
from terakoya.store.spans import Spans
from terakoya.store.token_store import WORDS, TokenStore
from terakoya.toolkit.random_keys import row_keys

logger = logging.getLogger("terakoya")


class EncoderRows:
    """The rows of one store in the layout `packed`, `stream`, `lines` or `pairs`; see `Layout`."""

    def __init__(
        self, store: TokenStore, layout: Layout, *, sequence_length: int, seed: int, store_id: int | str
    ) -> None:
        """Opens the plan; builds it first where it does not exist. Raises UserError where the store does not fit the
        layout."""
        self.store = store
        self.layout = layout
        self.sequence_length = sequence_length
        self.seed = seed
        self.store_id = store_id
        self.vocabulary: Vocabulary = store.facts.vocabulary
        self._tokens = np.asarray(store.tokens)
        self._spans = Spans(store)
        self._check()
        cls, sep, pad = self.vocabulary.cls, self.vocabulary.encoder_end, self.vocabulary.pad
        assert sep is not None and pad is not None, "checked above"
        self._prefix = int(cls is not None)
        self._framing_ids = pad, pad if cls is None else cls, sep
        self._words: tuple[np.ndarray, int] | None = None
        if store.facts.word_starts:
            bits, skipped = store.flag_bits(WORDS)
            self._words = np.asarray(bits), skipped
        self._pairs: OrderedDict[int, PairPlan] = OrderedDict()
        self._plan: Plan | None = None
        if layout.kind in ("packed", "lines"):
            count, spans = store.facts.documents, self._spans.documents
            if layout.kind == "lines":
                count, spans = store.facts.sequences, self._spans.lines
            wanted = PlanKind(layout.kind, sequence_length, self._prefix + 1, count)
            self._plan = load_or_build_plan(store.local_folder, store.fingerprint, wanted, spans)
        self._rows = self.count(0)

    def count(self, epoch: int) -> int:
        """Number of rows in `epoch`; only the number of pairs differs between epochs."""
        if self.layout.kind == "pairs":
            return len(self._epoch_pairs(epoch))
        if self.layout.kind == "stream":
            return -(-self._spans.stream_length // self._body)
        assert self._plan is not None
        return len(self._plan)

    def load(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """The rows numbered `rows` (B,) of the plan of `epoch`, with their keys (B,)."""
        segments, next_sentence = self._segments(epoch, rows, keys)
        return self._assemble(segments, keys, next_sentence)

    def documents(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Numbers of the documents of each piece of text in the rows that `load` returns, (n,)."""
        segments, _ = self._segments(epoch, rows, keys)
        return Spans(self.store, added_positions=0).document_at(segments.start[segments.length > 0])

    def _segments(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> tuple[RowSegments, np.ndarray | None]:
        """The segments of `rows`; of pairs also which second segments come from another document (B,)."""
        if self.layout.kind == "pairs":
            plan = self._epoch_pairs(epoch)
            rows = rows % len(plan)
            return self._pair_segments(plan, rows, keys), plan.random[rows]
        return (self._stream_segments if self.layout.kind == "stream" else self._plan_segments)(rows), None

    def blank_row(self) -> Rows:
        """One row of [CLS] [SEP]."""
        zero, one, prefix = np.zeros(1, np.int64), np.ones(1, np.int64), np.full(1, self._prefix)
        paired = self.layout.kind == "pairs"
        segments = RowSegments(zero, zero, zero, prefix, one, zero, zero if paired else None)
        return self._assemble(segments, np.zeros(1, np.uint64), np.full(1, -100, np.int8) if paired else None)

    # ------------------------------------------------------------------------------------------- segments of rows

    def _plan_segments(self, rows: np.ndarray) -> RowSegments:
        """The pieces of plan rows, each an isolated document between [CLS] and [SEP]."""
        assert self._plan is not None
        first = self._plan.rows[rows]
        counts = self._plan.rows[rows + 1] - first
        row, ordinal = group_indices(counts)
        pieces = first[row] + ordinal
        lengths, ones = self._plan.lengths[pieces].astype(np.int64), np.ones(len(row), np.int64)
        return RowSegments(row, self._plan.starts[pieces], lengths, ones * self._prefix, ones, ordinal)

    def _stream_segments(self, rows: np.ndarray) -> RowSegments:
        """Rows of the stream, in which one separator follows each document."""
        body = self._body
        begin = rows * body
        end = np.minimum(begin + body, self._spans.stream_length)
        first = self._spans.document_at(begin)
        row, ordinal = group_indices(self._spans.document_at(end - 1) - first + 1)
        document = first[row] + ordinal
        start, stop = self._spans.stream_start(document), self._spans.stream_start(document + 1)
        separators = (stop > start).astype(np.int64)  # the last place of a document's part of the stream
        skipped = np.maximum(begin[row] - start, 0)
        text_stop = np.minimum(stop - separators, end[row])
        length = np.maximum(text_stop - start - skipped, 0)
        suffix = separators * (stop <= end[row])
        is_last = np.append(row[1:] != row[:-1], True)
        return RowSegments(
            row,
            self._spans.document_start(document) + skipped,
            length,
            (ordinal == 0) * np.int64(self._prefix),
            suffix + is_last,
            np.zeros(len(row), np.int64),
        )

    def _pair_segments(self, plan: PairPlan, rows: np.ndarray, keys: np.ndarray) -> RowSegments:
        """[CLS] A [SEP] B [SEP], truncated to the sequence length."""
        starts, lengths = truncate_pairs(plan.starts[rows], plan.lengths[rows], self.sequence_length - 3, keys)
        side = np.tile(np.arange(2), len(rows))
        return RowSegments(
            np.repeat(np.arange(len(rows)), 2),
            starts.ravel(),
            lengths.ravel(),
            1 - side,
            np.ones(2 * len(rows), np.int64),
            np.zeros(2 * len(rows), np.int64),
            side,
        )

    def _assemble(self, segments: RowSegments, keys: np.ndarray, next_sentence: np.ndarray | None) -> Rows:
        """The arrays of a batch: as wide as a row; for `lines` and `pairs`, as the longest row, in
        multiples of `WIDTH_STEP`."""
        self.store.touch(segments.start, segments.length)
        width = self.sequence_length
        if self.layout.kind in ("lines", "pairs"):
            width = min(width, -(-int(segments.row_lengths(len(keys)).max()) // WIDTH_STEP) * WIDTH_STEP)
        assembled = assemble_rows(
            segments,
            keys,
            width,
            self._tokens,
            self._words,
            framing_ids=self._framing_ids,
            restart_positions=self.layout.kind in ("packed", "lines"),
        )
        return replace(assembled, next_sentence=next_sentence)

    # ------------------------------------------------------------------------------------ requirements on the store

    def _check(self) -> None:
        """Raises UserError where the store does not fit the layout."""
        where = f"{self.store.folder}: layout {self.layout.kind}"
        if self.layout.kind == "megatron":
            raise UserError(f"{where}: this layout is for causal models")
        v = self.vocabulary
        needed = {"cls": v.cls, "sep": v.sep, "pad": v.pad}
        if self.layout.framing == "encoder_decoder":
            needed = {"sep or an eos": v.encoder_end, "pad": v.pad}
        for name, id in needed.items():
            if id is None:
                raise UserError(
                    f"{where}: expected a vocabulary with a {name} token, got none; use a tokenizer that has one "
                    "(train a tokenizer of type sentencepiece with --special-tokens bert)"
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
                f"{where}: expected at least two documents, got fewer; a random next sentence needs another document"
            )

    @property
    def _body(self) -> int:
        """The number of positions in a row of `stream` that are not its [CLS] or its last [SEP]."""
        return self.sequence_length - self._prefix - 1

    def _epoch_pairs(self, epoch: int) -> PairPlan:
        """The pairs of `epoch`; the pairs of the two epochs used last are cached."""
        if epoch in self._pairs:
            self._pairs.move_to_end(epoch)
            return self._pairs[epoch]
        starts, lengths = self._spans.lines(0, self.store.facts.sequences)
        plan = plan_pairs(
            starts,
            starts + lengths,
            self.store.first_sequences(np.arange(self.store.facts.documents + 1)),
            budget=self.sequence_length - 3,
            short_sequence_probability=self.layout.short_sequence_probability,
            random_next_probability=self.layout.random_next_probability,
            keys_of=partial(row_keys, self.seed, epoch, self.store_id),
        )
        if epoch:
            logger.info(
                "%s: epoch %d has %d pairs; the run takes %d rows of them",
                self.store.folder,
                epoch,
                len(plan),
                self._rows,
            )
        self._pairs[epoch] = plan
        while len(self._pairs) > 2:
            self._pairs.popitem(last=False)
        return plan

"""Rows for causal models: each token's label is the next token.

A document is a sequence of places: a beginning-of-sequence token if the layout has one, the document's tokens, and an
end-of-sequence token. The last place of a document, or of the stream of all documents, is only a label. So rows that
follow each other overlap by that one token, and every place but the first of a document (of the stream) is a label
exactly once.

Letters: B rows, T tokens of a row, S segments of all rows, n any number of places or documents.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from terakoya.components.rows import Layout, Rows, group_indices
from terakoya.errors import UserError
from terakoya.rows.megatron_order import MegatronOrder
from terakoya.rows.packing import Plan, PlanKind, load_or_build_plan
from terakoya.rows.row_assembly import RowSegments, assemble_rows
from terakoya.store.spans import Spans
from terakoya.store.token_store import LEARNED, TokenStore

IGNORED = -100
"""The label of a position with nothing to predict."""

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class _Runs:
    """Ranges of adjacent places of documents, in row order; every array (S,) int64.

    `document` is the document's number in the store, `first` its first place, [begin, stop) the places of the range;
    `ordinal` numbers the documents that are isolated from each other in a row.
    """

    row: np.ndarray
    document: np.ndarray
    first: np.ndarray
    begin: np.ndarray
    stop: np.ndarray
    ordinal: np.ndarray


class CausalRows:
    """The rows of one store in the layout `packed`, `padded`, `stream` or `megatron`; see `Layout`."""

    def __init__(self, store: TokenStore, layout: Layout, *, sequence_length: int, seed: int, shuffle: bool) -> None:
        """Opens the packing plan; builds it first where it does not exist. Without `shuffle` the rows of `megatron` are
        those of `stream`. Raises UserError where the store does not fit the layout."""
        vocabulary, stored_end = store.facts.vocabulary, store.facts.eos
        self._end = (vocabulary.end if layout.append_eos else None) if stored_end is None else stored_end
        self._bos = vocabulary.bos if layout.bos else None
        _check(store, layout, self._end)
        self._layout, self._length = layout, sequence_length
        self._adds_end = int(stored_end is None and self._end is not None)
        self._store, self._tokens = store, np.asarray(store.tokens)
        self._spans = Spans(store, added_positions=int(layout.bos) + self._adds_end)
        fills = (vocabulary.pad, self._end, 0)
        self._pad = next(each for each in fills if each is not None)
        self._plan: Plan | None = None
        self._order: MegatronOrder | None = None
        self._learned_bits: tuple[np.ndarray, int] | None = None
        if layout.whole is not None:
            assert not layout.bos and not self._adds_end, "the documents contain all special tokens"
            self._plan = layout.whole.plan(store, layout.kind, sequence_length, self._inputs)
            if layout.whole.only_learned:
                self._learned_bits = store.flag_bits(LEARNED)
        elif layout.kind == "packed":
            kind = f"causal{'-bos' * layout.bos}{'-open' * (self._end is None)}"
            wanted = PlanKind(kind, sequence_length, 0, store.facts.documents)
            self._plan = load_or_build_plan(store.local_folder, store.fingerprint, wanted, self._inputs)
        elif layout.kind == "megatron" and shuffle:
            bounds = self._spans.stream_start(np.arange(store.facts.documents + 1))
            self._order = MegatronOrder(
                np.diff(bounds), sequence_length=sequence_length, samples=layout.samples, seed=seed
            )

    def count(self, epoch: int) -> int:
        """Number of rows, the same in every epoch."""
        if self._plan is not None:
            return len(self._plan)
        if self._order is not None:
            return len(self._order)
        return -(-(self._spans.stream_length - 1) // self._length)

    def load(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """The rows numbered `rows` (B,) of `epoch`, with their keys (B,)."""
        if self._plan is not None:
            return self._load_packed(self._plan, rows, keys)
        return self._load_joined(epoch, rows, keys)

    def blank_row(self) -> Rows:
        """One row of one token without a label."""
        shape = (1, self._length)
        document_ids = np.full(shape, -1, np.int32)
        document_ids[0, 0] = 0
        return Rows(
            np.full(shape, self._pad, np.int32),
            document_ids,
            np.zeros(shape, np.int32),
            None,
            np.zeros(1, np.uint64),
            labels=np.full(shape, IGNORED, np.int32),
        )

    def documents(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Numbers of the documents of each piece of text in the rows that `load` returns, (n,)."""
        runs = self._packed_runs(self._plan, rows) if self._plan is not None else self._joined_runs(epoch, rows)[1]
        return runs.document

    def document_starts(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """Whether a document begins at each position of the rows numbered `rows` (B,) of `epoch`: (B, T) bool. For a
        document that was split, only its first part counts."""
        runs = self._packed_runs(self._plan, rows) if self._plan is not None else self._joined_runs(epoch, rows)[1]
        length = runs.stop - runs.begin
        column = _last_columns(runs.row, length) + 1 - length
        starts = np.zeros((len(rows), self._length), bool)
        is_start = runs.begin == runs.first
        starts[runs.row[is_start], column[is_start]] = True
        return starts

    def _load_packed(self, plan: Plan, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """Rows of pieces, each piece an isolated document."""
        runs = self._packed_runs(plan, rows)
        following = self._tokens_at(runs.document, runs.stop - runs.first)
        last = runs.row * self._length + _last_columns(runs.row, runs.stop - runs.begin)
        assembled = self._assemble(self._segments(runs), last, following, keys, restart_positions=True)
        return assembled if self._learned_bits is None else self._keep_learned(assembled, runs, last)

    def _keep_learned(self, rows: Rows, runs: _Runs, last: np.ndarray) -> Rows:
        """`rows` with labels at tokens that are learned alone; runs end at the flat indices `last` (S,)."""
        whole, labels = self._layout.whole, rows.labels
        assert whole is not None and labels is not None and self._learned_bits is not None
        start = self._spans.document_start(runs.document) - runs.first
        token = np.zeros(labels.size, np.int64)  # the index of each label in the store's tokens
        length = runs.stop - runs.begin
        owner, ordinal = group_indices(length)
        token[last[owner] - length[owner] + 1 + ordinal] = (start + runs.begin)[owner] + 1 + ordinal
        learned = _flags_at(self._learned_bits, token).reshape(labels.shape) & (labels != IGNORED)
        return replace(
            rows, labels=np.where(whole.choose_labels(learned, rows.document_ids), labels, np.int32(IGNORED))
        )

    def _packed_runs(self, plan: Plan, rows: np.ndarray) -> _Runs:
        first = plan.rows[rows]
        row, ordinal = group_indices(plan.rows[rows + 1] - first)
        pieces = first[row] + ordinal
        start, length = plan.starts[pieces], plan.lengths[pieces].astype(np.int64)
        document = self._spans.document_at(start)
        return _Runs(row, document, self._spans.stream_start(document), start, start + length, ordinal)

    def _load_joined(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """Rows of documents joined by their end tokens, in the store's order or in Megatron-LM's."""
        stream, runs, begin, stop = self._joined_runs(epoch, rows)
        after = stream.document_at(stop)
        following = self._tokens_at(stream.in_store(after), stop - stream.stream_start(after))
        last = np.arange(len(rows)) * self._length + stop - begin - 1
        return self._assemble(self._segments(runs), last, following, keys, restart_positions=False)

    def _joined_runs(self, epoch: int, rows: np.ndarray) -> tuple[Spans | MegatronOrder, _Runs, np.ndarray, np.ndarray]:
        """The stream of joined documents, the runs of the rows in it, and the begin and stop of each row in it (B,)."""
        stream: Spans | MegatronOrder = self._spans
        if self._order is not None:
            stream = self._order.of_epoch(epoch)
            rows = stream.samples(rows)
        begin = rows * self._length
        stop = np.minimum(begin + self._length, stream.stream_length - 1)
        first = stream.document_at(begin)
        row, ordinal = group_indices(stream.document_at(stop - 1) - first + 1)
        number = first[row] + ordinal
        start = stream.stream_start(number)
        run = np.maximum(begin[row], start), np.minimum(stop[row], stream.stream_start(number + 1))
        return stream, _Runs(row, stream.in_store(number), start, *run, np.zeros_like(row)), begin, stop

    def _segments(self, runs: _Runs) -> RowSegments:
        """The stored tokens of each run, and the special tokens around them."""
        bos = int(self._layout.bos)
        begin, stop = runs.begin - runs.first, runs.stop - runs.first
        text = self._text_length(runs.document)
        start = np.maximum(begin - bos, 0)
        return RowSegments(
            runs.row,
            self._spans.document_start(runs.document) + start,
            np.minimum(stop - bos, text) - start,
            ((begin == 0) & bool(bos)).astype(np.int64),
            (stop - bos > text).astype(np.int64),
            runs.ordinal,
        )

    def _tokens_at(self, document: np.ndarray, place: np.ndarray) -> np.ndarray:
        """The ids (n,) at each `place` (n,) of the store's `document` (n,), counted from the document's first place."""
        within = place - int(self._layout.bos)
        at = np.clip(self._spans.document_start(document) + within, 0, len(self._tokens) - 1)
        self._store.touch(at, 1)
        tokens = self._tokens[at].astype(np.int32)
        if self._adds_end:
            tokens[within == self._text_length(document)] = self._end
        if self._bos is not None:
            tokens[within < 0] = self._bos
        return tokens

    def _text_length(self, document: np.ndarray) -> np.ndarray:
        """The number of stored tokens (n,) of each of `document` (n,)."""
        return self._spans.document_start(document + 1) - self._spans.document_start(document)

    def _inputs(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """First places and numbers of inputs (n,) of documents [first, stop): all places but each document's last."""
        bounds = self._spans.stream_start(np.arange(first, stop + 1))
        return bounds[:-1], np.diff(bounds) - 1

    def _assemble(
        self,
        segments: RowSegments,
        last: np.ndarray,
        following: np.ndarray,
        keys: np.ndarray,
        *,
        restart_positions: bool,
    ) -> Rows:
        """The arrays of a batch. At the flat indices `last` (n,) runs end whose next ids are `following` (n,)."""
        self._store.touch(segments.start, segments.length)
        begin, end = (self._pad if each is None else each for each in (self._bos, self._end))
        assembled = assemble_rows(
            segments,
            keys,
            self._length,
            self._tokens,
            None,
            framing_ids=(self._pad, begin, end),
            restart_positions=restart_positions,
        )
        flat = assembled.tokens.reshape(-1)
        labels = np.empty_like(flat)
        labels[:-1] = flat[1:]
        labels[last] = following
        labels[assembled.document_ids.reshape(-1) < 0] = IGNORED
        if self._layout.eod_mask_loss:
            labels[flat == self._end] = IGNORED
        return replace(assembled, labels=labels.reshape(assembled.tokens.shape))


def _flags_at(bits: tuple[np.ndarray, int], tokens: np.ndarray) -> np.ndarray:
    """The flags (n,) bool at the token indices `tokens` (n,), from `bits` in the form of `TokenStore.flag_bits`. An
    index after the end reads the last byte."""
    packed, skipped = bits
    tokens = tokens + skipped
    flags: np.ndarray = (np.take(packed, tokens >> 3, mode="clip") >> (tokens & 7).astype(np.uint8)) & 1
    return flags.view(bool)


def _last_columns(row: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The column of the last token of each segment (S,), where the segments of a row are adjacent from column 0 on."""
    total = np.cumsum(length)
    begins = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    before = (total - length)[begins]
    return total - 1 - np.repeat(before, np.diff(np.append(begins, len(row))))


def _check(store: TokenStore, layout: Layout, end: int | None) -> None:
    """Raises UserError where the store does not fit the layout; warns where a model will not learn document ends."""
    where, vocabulary = f"{store.folder}: layout {layout.kind}", store.facts.vocabulary
    kinds = ("packed", "stream", "megatron") if layout.whole is None else ("packed", "padded")
    if layout.kind not in kinds:
        raise UserError(f"{where}: causal rows have the layouts {', '.join(kinds[:-1])} and {kinds[-1]}")
    if layout.whole is not None:
        layout.whole.check(store)
    elif store.facts.learned:
        logger.warning(
            "%s: the store holds conversations, and every token is learnt, also of questions: the objective ignores "
            "the marks of answers; the objective instruction uses them",
            store.folder,
        )
    if layout.bos and layout.kind == "megatron":
        raise UserError(f"{where}: Megatron-LM's rows have no beginning-of-sequence token; set objective.bos to false")
    if layout.bos and vocabulary.bos is None:
        raise UserError(
            f"{where}: objective.bos: expected a vocabulary with a beginning-of-sequence token, got none; set it to "
            "false or use a tokenizer that has one"
        )
    if layout.eod_mask_loss and end is None:
        raise UserError(
            f"{where}: objective.eod_mask_loss: expected an end-of-document token, but neither the store nor its "
            "vocabulary has one; use a tokenizer with an end-of-sequence token"
        )
    if end is None and layout.append_eos:
        logger.warning(
            "%s: the tokenizer has no end-of-sequence token (and no [SEP]): documents have no end token, and the model "
            "will not learn to stop",
            where,
        )
    elif end is not None and end != vocabulary.end:
        logger.warning(
            "%s: stored documents end with id %d, but the tokenizer's end-of-sequence token is %s: when generating, "
            "stop at %d",
            where,
            end,
            vocabulary.end,
            end,
        )

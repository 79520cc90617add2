"""Rows for causal models: each token's label is the token that follows it.

A document is a run of places: its beginning token if the layout wants one, its tokens, and its end. The last place of
a document, or of the stream of all documents, is a label only. So rows that are cut from one another overlap by that
one token, and every place but the first of a document (of the stream) is a label exactly once.

Letters: B rows, T tokens of a row, S segments of all rows, n any number of places or documents.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from terakoya.data.framing import Segments, frame
from terakoya.data.layouts import Layout, Rows, ranges
from terakoya.data.megatron_order import MegatronOrder
from terakoya.data.packing import Plan, stored_plan
from terakoya.data.spans import Spans
from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.data.store import TokenStore

IGNORED = -100
"""The label of a place with nothing to predict."""

logger = logging.getLogger("terakoya")


class CausalRows:
    """Cuts the rows of one store in the layout `packed`, `stream` or `megatron`; see `Layout`."""

    def __init__(self, store: TokenStore, layout: Layout, *, sequence_length: int, seed: int, shuffle: bool) -> None:
        """Opens the packing plan, building it first where there is none. Without `shuffle` rows of `megatron` are those
        of `stream`. Raises UserError where the store does not fit the layout."""
        vocabulary, stored_end = store.facts.vocabulary, store.facts.eos
        self._end = (vocabulary.end if layout.append_eos else None) if stored_end is None else stored_end
        self._bos = vocabulary.bos if layout.bos else None
        _check(store, layout, self._end)
        self._layout, self._length = layout, sequence_length
        self._adds_end = int(stored_end is None and self._end is not None)
        self._tokens = np.asarray(store.tokens)
        self._spans = Spans(store, places=int(layout.bos) + self._adds_end)
        fills = (vocabulary.pad, self._end, 0)
        self._pad = next(each for each in fills if each is not None)
        self._plan: Plan | None = None
        self._order: MegatronOrder | None = None
        if layout.kind == "packed":
            self._plan = stored_plan(
                store.folder,
                store.fingerprint,
                kind=f"causal{'-bos' * layout.bos}{'-open' * (self._end is None)}",
                sequence_length=sequence_length,
                framing=0,
                count=store.facts.documents,
                spans=self._inputs,
            )
        elif layout.kind == "megatron" and shuffle:
            bounds = self._spans.stream_start(np.arange(store.facts.documents + 1))
            self._order = MegatronOrder(
                np.diff(bounds), sequence_length=sequence_length, samples=layout.samples, seed=seed
            )

    def count(self, epoch: int) -> int:
        """Rows of every epoch."""
        if self._plan is not None:
            return len(self._plan)
        if self._order is not None:
            return len(self._order)
        return -(-(self._spans.stream_length - 1) // self._length)

    def cut(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """The rows numbered `rows` (B,) of `epoch`, with their keys (B,)."""
        if self._plan is not None:
            return self._packed(self._plan, rows, keys)
        return self._joined(epoch, rows, keys)

    def blank(self) -> Rows:
        """One row of one token, which predicts nothing."""
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

    def _packed(self, plan: Plan, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """Rows of pieces, each a document of its own."""
        first = plan.rows[rows]
        row, ordinal = ranges(plan.rows[rows + 1] - first)
        pieces = first[row] + ordinal
        start, length = plan.starts[pieces], plan.lengths[pieces].astype(np.int64)
        document = self._spans.document_at(start)
        segments = self._segments(row, document, self._spans.stream_start(document), (start, start + length), ordinal)
        following = self._token(document, start + length - self._spans.stream_start(document))
        return self._assemble(segments, row * self._length + _last(row, length), following, keys, restart=True)

    def _joined(self, epoch: int, rows: np.ndarray, keys: np.ndarray) -> Rows:
        """Rows of documents joined by their ends, in the store's order or in Megatron-LM's."""
        course: Spans | MegatronOrder = self._spans
        if self._order is not None:
            course = self._order.of_epoch(epoch)
            rows = course.samples(rows)
        begin = rows * self._length
        stop = np.minimum(begin + self._length, course.stream_length - 1)
        first = course.document_at(begin)
        row, ordinal = ranges(course.document_at(stop - 1) - first + 1)
        number = first[row] + ordinal
        start = course.stream_start(number)
        cut = np.maximum(begin[row], start), np.minimum(stop[row], course.stream_start(number + 1))
        segments = self._segments(row, course.in_store(number), start, cut, np.zeros(len(row), np.int64))
        after = course.document_at(stop)
        following = self._token(course.in_store(after), stop - course.stream_start(after))
        last = np.arange(len(rows)) * self._length + stop - begin - 1
        return self._assemble(segments, last, following, keys, restart=False)

    def _segments(
        self,
        row: np.ndarray,
        document: np.ndarray,
        first_place: np.ndarray,
        cut: tuple[np.ndarray, np.ndarray],
        ordinal: np.ndarray,
    ) -> Segments:
        """Places [cut[0], cut[1]) of the store's `document` (S,), whose own first one is `first_place` (S,)."""
        lead = int(self._layout.bos)
        begin, stop = cut[0] - first_place, cut[1] - first_place
        text = self._text_length(document)
        start = np.maximum(begin - lead, 0)
        return Segments(
            row,
            self._spans.document_start(document) + start,
            np.minimum(stop - lead, text) - start,
            ((begin == 0) & bool(lead)).astype(np.int64),
            (stop - lead > text).astype(np.int64),
            ordinal,
        )

    def _token(self, document: np.ndarray, place: np.ndarray) -> np.ndarray:
        """The ids (n,) at each `place` (n,) of the store's `document` (n,), counted from the document's first."""
        within = place - int(self._layout.bos)
        tokens = np.take(self._tokens, self._spans.document_start(document) + within, mode="clip").astype(np.int32)
        if self._adds_end:
            tokens[within == self._text_length(document)] = self._end
        if self._bos is not None:
            tokens[within < 0] = self._bos
        return tokens

    def _text_length(self, document: np.ndarray) -> np.ndarray:
        """The stored tokens (n,) of each of `document` (n,)."""
        return self._spans.document_start(document + 1) - self._spans.document_start(document)

    def _inputs(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """First places and numbers of inputs (n,) of documents [first, stop): all places but each one's last."""
        bounds = self._spans.stream_start(np.arange(first, stop + 1))
        return bounds[:-1], np.diff(bounds) - 1

    def _assemble(
        self, segments: Segments, last: np.ndarray, following: np.ndarray, keys: np.ndarray, *, restart: bool
    ) -> Rows:
        """The arrays of a batch. At the flat indices `last` (n,) a run ends that goes on with the ids `following`."""
        shape = (len(keys), self._length)
        framed = frame(
            segments,
            shape,
            self._tokens,
            None,
            pad=self._pad,
            cls=self._pad if self._bos is None else self._bos,
            sep=self._pad if self._end is None else self._end,
            restart=restart,
        )
        flat = framed.tokens.reshape(-1)
        labels = np.empty_like(flat)
        labels[:-1] = flat[1:]
        labels[last] = following
        labels[framed.document_ids.reshape(-1) < 0] = IGNORED
        if self._layout.eod_mask_loss:
            labels[flat == self._end] = IGNORED
        return Rows(framed.tokens, framed.document_ids, framed.position_ids, None, keys, labels=labels.reshape(shape))


def _last(row: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The column of the last token of each segment (S,), those of one row following each other from its left."""
    total = np.cumsum(length)
    begins = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    before = (total - length)[begins]
    return total - 1 - np.repeat(before, np.diff(np.append(begins, len(row))))


def _check(store: TokenStore, layout: Layout, end: int | None) -> None:
    """Raises UserError where the layout cannot be cut from the store; warns of what a model will not learn."""
    where, vocabulary = f"{store.folder}: layout {layout.kind}", store.facts.vocabulary
    if layout.kind not in ("packed", "stream", "megatron"):
        raise UserError(f"{where}: causal rows have the layouts packed, stream and megatron")
    if layout.bos and layout.kind == "megatron":
        raise UserError(f"{where}: Megatron-LM's rows have no beginning-of-sequence token; set objective.bos to false")
    if layout.bos and vocabulary.bos is None:
        raise UserError(
            f"{where}: objective.bos: expected a vocabulary with a beginning-of-sequence token, got none; set it to "
            "false or use a tokenizer that has one"
        )
    if layout.eod_mask_loss and end is None:
        raise UserError(
            f"{where}: objective.eod_mask_loss: expected an end of document, but neither the store nor its vocabulary "
            "has one; use a tokenizer with an end-of-sequence token"
        )
    if end is None and layout.append_eos:
        logger.warning(
            "%s: the tokenizer has no end-of-sequence token (and no [SEP]): documents are not ended, and the model "
            "will not learn to stop",
            where,
        )
    elif end is not None and end != vocabulary.end:
        logger.warning(
            "%s: documents end with id %d as stored, but the tokenizer's end of sequence is %s: tell whoever generates "
            "to stop at %d",
            where,
            end,
            vocabulary.end,
            end,
        )

"""Where documents and lines are in a store's tokens, and where documents are in the stream of all documents.

Letters: n any number of documents, lines or positions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from terakoya.store.token_store import TokenStore


class Spans:
    """The spans of one store, without the EOS that it may have stored after each document.

    The stream is all documents in store order, each followed by one separator: the stored EOS, or, if the store has
    none, a position without a stored token. Positions are computed from the mapped index; nothing is kept in memory.
    All methods raise UserError where the index, or an id that they read, is damaged.
    """

    def __init__(self, store: TokenStore, *, added_positions: int | None = None) -> None:
        """`added_positions`: positions of each document in the stream that have no stored token; None counts only a
        separator that is not stored."""
        self._store = store
        self._tokens = np.asarray(store.tokens)
        self._count = store.facts.documents
        self._eos = store.facts.eos
        self._added = int(self._eos is None) if added_positions is None else added_positions

    @property
    def stream_length(self) -> int:
        """Positions in the stream."""
        return len(self._tokens) + self._added * self._count

    def documents(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns starts and lengths in tokens (n,) of documents [first, stop)."""
        bounds = self._store.document_starts(np.arange(first, stop + 1))
        return bounds[:-1], self._without_eos(bounds[:-1], bounds[1:]) - bounds[:-1]

    def lines(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns starts and lengths in tokens (n,) of lines [first, stop)."""
        bounds = self._store.sequence_starts(np.arange(first, stop + 1))
        starts, stops = bounds[:-1], bounds[1:]
        if self._eos is not None:
            documents = self._store.documents
            low, high = bisect_left(documents, first + 1), bisect_right(documents, stop)
            # with one entry more on either side, so that none is left out where the search met a damaged one
            near = self._store.first_sequences(np.arange(max(0, low - 1), min(high + 1, self._count + 1)))
            ends = near[(near > first) & (near <= stop)] - first - 1  # the last line of each document
            stops = stops.copy()
            stops[ends] = self._without_eos(starts[ends], stops[ends])
        return starts, stops - starts

    def document_start(self, document: np.ndarray) -> np.ndarray:
        """Returns where each of `document` (n,) starts in the tokens; for the number of documents, where they end."""
        return self._store.document_starts(document)

    def stream_start(self, document: np.ndarray) -> np.ndarray:
        """Returns where each of `document` (n,) starts in the stream."""
        return self.document_start(document) + self._added * document

    def document_at(self, position: np.ndarray) -> np.ndarray:
        """Returns the document at each `position` (n,) of the stream, by a binary search over the mapped index."""
        low = np.zeros(len(position), np.int64)
        high = np.full(len(position), self._count)
        while np.any(high - low > 1):
            middle = (low + high) // 2
            before = self._store.document_starts(middle, check=False) + self._added * middle <= position
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        self._store.document_starts(np.concatenate([low, high]))  # checks the entries that decide the result
        return low

    def in_store(self, document: np.ndarray) -> np.ndarray:
        """Returns the number in the store of each `document` (n,) of the stream: here the same number."""
        return document

    def _without_eos(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns `stops`, less 1 where the last token of [start, stop) is the stored EOS."""
        if self._eos is None:
            return stops
        last = np.maximum(stops - 1, 0)
        with self._store.reading():
            self._store.touch(last, 1)
            return stops - ((stops > starts) & (self._tokens[last] == self._eos))

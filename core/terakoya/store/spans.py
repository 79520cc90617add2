"""Where documents, lines and the stream of all documents lie in a store's tokens.

Letters: n any number of documents, lines or places.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from terakoya.store.token_store import TokenStore


class Spans:
    """The spans of one store, without the EOS that it may have stored after each document.

    The stream is every document in store order, each followed by one separator: the stored EOS, or where the store
    has none a place that it does not have. Its places are computed from the mapped index; nothing is kept in memory.
    """

    def __init__(self, store: TokenStore, *, places: int | None = None) -> None:
        """`places` is how many each document has in the stream that the store has not: where not given, that of its
        separator."""
        self._store = store
        self._tokens = np.asarray(store.tokens)
        self._documents = np.asarray(store.documents)
        self._eos = store.facts.eos
        self._places = int(self._eos is None) if places is None else places

    @property
    def stream_length(self) -> int:
        """Places in the stream."""
        return len(self._tokens) + self._places * (len(self._documents) - 1)

    def documents(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths in tokens (n,) of documents [first, stop)."""
        bounds = self.document_start(np.arange(first, stop + 1))
        return bounds[:-1], self._without_eos(bounds[:-1], bounds[1:]) - bounds[:-1]

    def lines(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and lengths in tokens (n,) of lines [first, stop)."""
        bounds = np.asarray(self._store.offsets[first : stop + 1])
        starts, stops = bounds[:-1], bounds[1:]
        if self._eos is not None:
            among = slice(bisect_left(self._documents, first + 1), bisect_right(self._documents, stop))
            ends = self._documents[among] - first - 1  # the last line of each document
            stops = stops.copy()
            stops[ends] = self._without_eos(starts[ends], stops[ends])
        return starts, stops - starts

    def document_start(self, document: np.ndarray) -> np.ndarray:
        """Where each of `document` (n,) starts in the tokens; their number is where the tokens end."""
        return np.asarray(self._store.offsets)[self._documents[document]]

    def stream_start(self, document: np.ndarray) -> np.ndarray:
        """Where each of `document` (n,) starts in the stream."""
        return self.document_start(document) + self._places * document

    def document_at(self, place: np.ndarray) -> np.ndarray:
        """The document that holds each `place` (n,) of the stream: a binary search over the mapped index."""
        low = np.zeros(len(place), np.int64)
        high = np.full(len(place), len(self._documents) - 1)
        while np.any(high - low > 1):
            middle = (low + high) // 2
            before = self.stream_start(middle) <= place
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return low

    def in_store(self, document: np.ndarray) -> np.ndarray:
        """Which document of the store each of `document` (n,) in the stream is: the same."""
        return document

    def _without_eos(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """`stops`, one less where the last token of [start, stop) is the stored EOS."""
        if self._eos is None:
            return stops
        return stops - ((stops > starts) & (self._tokens[np.maximum(stops - 1, 0)] == self._eos))

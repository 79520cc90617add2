"""One endless sequence of rows of several stores, and a thread that reads it ahead.

Global batch k is the rows [k * G, (k + 1) * G) of the sequence, for any number of processes;
`distributed/topology.py` assigns them to processes.

Letters: G rows of a global batch, T tokens of a row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from terakoya.components.rows import Rows
from terakoya.errors import UserError
from terakoya.rows.blending import Blend
from terakoya.rows.row_source import RowSource
from terakoya.store.document_sizes import TextPerToken

T = TypeVar("T")
AHEAD = 8
"""Largest number of prefetched items."""


@dataclass(frozen=True)
class Stage:
    """A data stage: from `first_row` on, rows come from these sources; `weights` by the number of the source."""

    first_row: int
    weights: Mapping[int, float]


class _Mixture:
    """The rows of one stage: the source of each row, and the index within that source.

    `consumed` is how many rows of each source the earlier stages consumed: each source continues after them.
    """

    def __init__(self, stage: Stage, consumed: Sequence[int]) -> None:
        self.first_row = stage.first_row
        self._sources = np.array(list(stage.weights), np.int64)
        self._consumed = np.array(consumed, np.int64)
        self._blend = Blend(list(stage.weights.values()))

    def positions(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources (n,) and indices within them (n,) of the rows [start, stop) of the sequence."""
        stores, indices = self._blend.positions(start - self.first_row, stop - self.first_row)
        sources = self._sources[stores]
        return sources, indices + self._consumed[sources]

    def rows_per_store(self, row: int) -> list[int]:
        """How many rows of each source come before `row` of the sequence."""
        consumed = self._consumed.copy()
        consumed[self._sources] += self._blend.rows_per_store(row - self.first_row)
        return [int(each) for each in consumed]


class Loader:
    """The endless sequence of rows of a mixture of stores. It has no state: any row can be loaded at any time."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], *, stages: Sequence[Stage] = ()) -> None:
        """`weights` are the sources' shares of the rows, 0 for a source that only a later stage uses; `stages` are in
        the order of their first rows. Raises UserError if the weights are not valid shares, or the stores' rows do not
        fit into one batch."""
        assert len(sources) == len(weights)
        first = sources[0]
        for number, source in enumerate(sources):
            where = f"{source.store.folder}: in one blend with {first.store.folder}"
            if source.store.facts.vocabulary != first.store.facts.vocabulary:
                raise UserError(f"{where}: expected the same vocabulary; prepare both with the same tokenizer")
            words_matter = source.layout.framing != "causal"
            if words_matter and source.store.facts.word_starts != first.store.facts.word_starts:
                raise UserError(f"{where}: expected word starts in both or neither; prepare both the same way")
            assert source.layout == first.layout
            assert source.store_id == number, "a source's keys depend on its number in the blend"
        self.sources, self.weights = tuple(sources), tuple(weights)
        self._stages = (Stage(0, {number: weight for number, weight in enumerate(weights) if weight}), *stages)
        self._mixtures: list[_Mixture] = []
        for stage in self._stages:
            before = self._mixtures[-1].rows_per_store(stage.first_row) if self._mixtures else [0] * len(sources)
            assert not self._mixtures or stage.first_row > self._mixtures[-1].first_row
            assert len({sources[number].sequence_length for number in stage.weights}) == 1, "one stage, one length"
            self._mixtures.append(_Mixture(stage, before))

    def with_stage(self, stage: Stage) -> Loader:
        """Returns the sequence whose rows come from `stage` from its first row on."""
        return Loader(self.sources, self.weights, stages=(*self._stages[1:], stage))

    def mixture_at(self, row: int) -> list[tuple[RowSource, float]]:
        """Returns the sources of row `row` of the sequence and those around it, with their weights."""
        stage = next(each for each in reversed(self._stages) if each.first_row <= row)
        return [(self.sources[number], weight) for number, weight in stage.weights.items()]

    def load(self, start: int, stop: int) -> Rows:
        """The rows [start, stop) of the endless sequence as one batch (stop - start, T)."""
        parts: list[Rows] = []
        destinations: list[np.ndarray] = []
        for source, epoch, positions, destination in self.parts(start, stop):
            parts.append(source.load(epoch, positions))
            destinations.append(destination)
        return parts[0] if len(parts) == 1 else _merge(parts, np.concatenate(destinations), self.sources[0])

    def parts(self, start: int, stop: int) -> Iterator[tuple[RowSource, int, np.ndarray, np.ndarray]]:
        """Yields what `RowSource.load` takes for the rows [start, stop): source, epoch and positions (n,), and which of
        these rows they are, counted from 0 (n,)."""
        stores, indices = self._positions(start, stop)
        for store, source in enumerate(self.sources):
            of_store = np.flatnonzero(stores == store)
            epochs, positions = np.divmod(indices[of_store], len(source))
            for epoch in np.unique(epochs).tolist():
                of_epoch = epochs == epoch
                yield source, epoch, positions[of_epoch], of_store[of_epoch]

    def _positions(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and indices within them, (stop - start,) each, of the rows [start, stop)."""
        ends = [*(mixture.first_row for mixture in self._mixtures[1:]), stop]
        pieces = [
            mixture.positions(max(start, mixture.first_row), min(stop, end))
            for mixture, end in zip(self._mixtures, ends, strict=True)
            if max(start, mixture.first_row) < min(stop, end)
        ]
        if len(pieces) == 1:
            return pieces[0]
        sources, indices = zip(*pieces, strict=True)
        return np.concatenate(sources), np.concatenate(indices)

    def text_per_token(self, start: int, stop: int) -> TextPerToken | None:
        """How much text a token of the rows [start, stop) stands for: the mean of their stores by the rows of each.
        None where a store does not know its text."""
        rows = np.bincount(self._positions(start, stop)[0], minlength=len(self.sources))
        texts = [(source.store.text_per_token, n) for source, n in zip(self.sources, rows.tolist(), strict=True) if n]
        known = [(text, n / (stop - start)) for text, n in texts if text is not None]
        if len(known) < len(texts):
            return None
        return TextPerToken(sum(text.characters * n for text, n in known), sum(text.bytes * n for text, n in known))

    def store_positions(self, rows: int) -> list[dict[str, int | str]]:
        """The position of each store after `rows` rows of the sequence: consumed rows, whole epochs, and rows of the
        current epoch."""
        records: list[dict[str, int | str]] = []
        mixture = next(each for each in reversed(self._mixtures) if each.first_row <= rows)
        for source, consumed in zip(self.sources, mixture.rows_per_store(rows), strict=True):
            epoch, position = divmod(consumed, len(source))
            folder = source.store.name
            records.append({"store": folder, "rows": consumed, "epoch": epoch, "position": position})
        return records


class Prefetcher(Generic[T]):
    """Computes `function(first_step)`, `function(first_step + 1)`, ... ahead in one background thread.

    Iterate over it, or call `next`; close it when done (it is a context manager). An error of the function is raised
    in the consumer at the step of the error, after which there are no more items.
    """

    def __init__(
        self, function: Callable[[int], T], first_step: int, *, last_step: int | None = None, ahead: int = AHEAD
    ) -> None:
        """Keeps up to `ahead` items ready and computes new ones once half of them are used; ends before `last_step`
        where it is given: what is beyond may cost a plan of another epoch."""
        self._function = function
        # Two simple queues cost a tenth of a bounded one: one queue holds a permit for each item that may be computed.
        self._items: queue.SimpleQueue[tuple[T] | BaseException] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max(1, ahead)):
            self._permits.put(None)
        # Waking the thread takes the interpreter away from the running step, for longer than the batch of a short step
        # takes to compute. So permits are issued several at a time.
        self._permits_at_once = max(1, ahead // 2)
        self._used = 0
        self._ended = False
        self._thread = threading.Thread(
            target=self._run, args=(first_step, last_step), name="terakoya-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._items.get()
        self._used += 1
        if self._used == self._permits_at_once:
            self._used = 0
            for _ in range(self._permits_at_once):
                self._permits.put(None)
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        return item[0]

    def close(self) -> None:
        """Stops the thread and waits for its end; there are no further items. May be called twice."""
        self._ended = True
        self._permits.put(None)
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, step: int, last_step: int | None) -> None:
        while True:
            self._permits.get()
            if self._ended:
                return
            try:
                if step == last_step:
                    raise StopIteration
                self._items.put((self._function(step),))
            except BaseException as error:  # noqa: BLE001 - raised again in the consumer
                self._items.put(error)
                return
            step += 1


def fill_up(rows: Rows, size: int, source: RowSource) -> Rows:
    """Returns `rows` with rows of padding alone at the end: `size` rows, more than they are."""
    filled = _merge([rows, *[source.blank_row()] * (size - len(rows))], np.arange(size), source)
    filled.document_ids[len(rows) :] = -1  # a blank row frames a document without tokens
    return filled


def _merge(parts: Sequence[Rows], destinations: np.ndarray, source: RowSource) -> Rows:
    """Merges batches into one: row i of the concatenated parts goes to row destinations[i]. Narrow parts are padded."""
    width = max(part.tokens.shape[1] for part in parts)
    # causal rows may have no padding id, but are all of one width
    fills = {"tokens": source.vocabulary.pad or 0, "document_ids": -1, "labels": -100}

    def merge(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        present: list[np.ndarray] = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        shape = (len(destinations), *([width] if present[0].ndim == 2 else []))
        merged = np.full(shape, fills.get(name, 0), present[0].dtype)
        start = 0
        for array in present:
            rows = destinations[start : start + len(array)]
            if array.ndim == 2:
                merged[rows, : array.shape[1]] = array
            else:
                merged[rows] = array
            start += len(array)
        return merged

    arrays: Any = {each.name: merge(each.name) for each in fields(Rows) if each.name != "progress"}
    return Rows(**arrays, progress=parts[0].progress)

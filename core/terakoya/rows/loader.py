"""One endless order of rows over several stores, and reading it ahead.

Global batch k is rows [k * G, (k + 1) * G) of it, whatever the processes; who takes which of them is decided in
`training/world.py`.

Letters: G rows of a global batch, T tokens of a row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from terakoya.components.rows import Rows
from terakoya.errors import UserError
from terakoya.rows.blending import Blend
from terakoya.rows.row_source import RowSource

T = TypeVar("T")
AHEAD = 8
"""Items that lie ready at most."""


@dataclass(frozen=True)
class Stage:
    """From row `first_row` of the order on, rows come from these stores: `weights` by the number of the source."""

    first_row: int
    weights: Mapping[int, float]


class _Mixture:
    """The rows of one stage, counted from its first: which source and which index within that source.

    `taken` says how many rows of each source the stages before it took: each source goes on where it stood.
    """

    def __init__(self, stage: Stage, taken: Sequence[int]) -> None:
        self.first_row = stage.first_row
        self._sources = np.array(list(stage.weights), np.int64)
        self._taken = np.array(taken, np.int64)
        self._blend = Blend(list(stage.weights.values()))

    def positions(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources (n,) and indices within them (n,) of the rows [start, stop) of the order."""
        stores, indices = self._blend.positions(start - self.first_row, stop - self.first_row)
        sources = self._sources[stores]
        return sources, indices + self._taken[sources]

    def rows_per_store(self, row: int) -> list[int]:
        """How many rows of each source come before `row` of the order."""
        taken = self._taken.copy()
        taken[self._sources] += self._blend.rows_per_store(row - self.first_row)
        return [int(each) for each in taken]


class Loader:
    """The blended endless sequence of rows of several stores. No state: any row can be had at any time."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], *, stages: Sequence[Stage] = ()) -> None:
        """`weights` are the sources' shares of rows, 0 for one that comes in a later stage alone; `stages` are in the
        order of their first rows.

        Raises UserError for weights that are no shares, and for stores whose rows do not fit into one batch.
        """
        assert len(sources) == len(weights)
        first = sources[0]
        for number, source in enumerate(sources):
            where = f"{source.store.folder}: in one blend with {first.store.folder}"
            if source.store.facts.vocabulary != first.store.facts.vocabulary:
                raise UserError(f"{where}: expected the same vocabulary; prepare both with the same tokenizer")
            words_matter = source.layout.framing == "encoder"
            if words_matter and source.store.facts.word_starts != first.store.facts.word_starts:
                raise UserError(f"{where}: expected word starts in both or neither; prepare both alike")
            assert (source.layout, source.sequence_length) == (first.layout, first.sequence_length)
            assert source.store_index == number, "a source's keys name its place in the blend"
        self.sources, self.weights = tuple(sources), tuple(weights)
        self._mixtures: list[_Mixture] = []
        for stage in (Stage(0, {number: weight for number, weight in enumerate(weights) if weight}), *stages):
            before = self._mixtures[-1].rows_per_store(stage.first_row) if self._mixtures else [0] * len(sources)
            assert not self._mixtures or stage.first_row > self._mixtures[-1].first_row
            self._mixtures.append(_Mixture(stage, before))

    def load(self, start: int, stop: int) -> Rows:
        """The rows [start, stop) of the endless sequence as one batch (stop - start, T)."""
        stores, indices = self._positions(start, stop)
        parts: list[Rows] = []
        places: list[np.ndarray] = []
        for store, source in enumerate(self.sources):
            of_store = np.flatnonzero(stores == store)
            epochs, positions = np.divmod(indices[of_store], len(source))
            for epoch in np.unique(epochs).tolist():
                chosen = epochs == epoch
                parts.append(source.load(epoch, positions[chosen]))
                places.append(of_store[chosen])
        return parts[0] if len(parts) == 1 else _merge(parts, np.concatenate(places), self.sources[0])

    def _positions(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and indices within them, (stop - start,) each, of the rows [start, stop)."""
        ends = [*(mixture.first_row for mixture in self._mixtures[1:]), stop]
        found = [
            mixture.positions(max(start, mixture.first_row), min(stop, end))
            for mixture, end in zip(self._mixtures, ends, strict=True)
            if max(start, mixture.first_row) < min(stop, end)
        ]
        if len(found) == 1:
            return found[0]
        return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])

    def blank_row(self) -> Rows:
        """One row with nothing to learn, for the empty slots of a step; its counts are to be taken as 0."""
        return self.sources[0].blank_row()

    def store_positions(self, rows: int) -> list[dict[str, int | str]]:
        """Where each store stands after `rows` rows of the order: rows taken, whole epochs, rows in the current one."""
        records: list[dict[str, int | str]] = []
        mixture = next(each for each in reversed(self._mixtures) if each.first_row <= rows)
        for source, taken in zip(self.sources, mixture.rows_per_store(rows), strict=True):
            epoch, position = divmod(taken, len(source))
            folder = str(source.store.folder)
            records.append({"store": folder, "rows": taken, "epoch": epoch, "position": position})
        return records


class Prefetcher(Generic[T]):
    """`function(first_step)`, `function(first_step + 1)`, ... computed ahead by one background thread.

    Iterate over it, or call `next`; close it when done (it is a context manager). What the function raises is raised
    in the consumer at the step it belongs to, after which there are no more items.
    """

    def __init__(
        self, function: Callable[[int], T], first_step: int, *, last_step: int | None = None, ahead: int = AHEAD
    ) -> None:
        """Keeps up to `ahead` items ready, and from half of that on makes new ones; ends before `last_step` where one
        is given."""
        self._function = function
        # Two simple queues cost a tenth of a bounded one: for each item that may be made a permit lies ready.
        self._items: queue.SimpleQueue[tuple[T] | BaseException] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max(1, ahead)):
            self._permits.put(None)
        # Waking the thread takes the interpreter from the step that runs, longer than a short step's batch does.
        self._together = max(1, ahead // 2)
        self._taken = 0
        self._ended = False
        self._thread = threading.Thread(
            target=self._work, args=(first_step, last_step), name="terakoya-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        made = self._items.get()
        self._taken += 1
        if self._taken == self._together:
            self._taken = 0
            for _ in range(self._together):
                self._permits.put(None)
        if isinstance(made, BaseException):
            self._ended = True
            raise made
        return made[0]

    def close(self) -> None:
        """Stops the thread and waits until it has left; no items come after. May be called twice."""
        self._ended = True
        self._permits.put(None)
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, step: int, last_step: int | None) -> None:
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


def _merge(parts: Sequence[Rows], places: np.ndarray, source: RowSource) -> Rows:
    """Batches put together as one: row i of all parts in order goes to places[i]. Narrow ones are padded."""
    width = max(part.tokens.shape[1] for part in parts)
    pad = source.vocabulary.pad or 0  # causal rows, which may have none, are all of one width

    def merge(arrays: Sequence[np.ndarray | None], fill: int = 0) -> np.ndarray | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        merged = np.full((len(places), *([width] if present[0].ndim == 2 else [])), fill, present[0].dtype)
        at = 0
        for array in present:
            to = places[at : at + len(array)]
            if array.ndim == 2:
                merged[to, : array.shape[1]] = array
            else:
                merged[to] = array
            at += len(array)
        return merged

    tokens = merge([part.tokens for part in parts], pad)
    document_ids = merge([part.document_ids for part in parts], -1)
    position_ids = merge([part.position_ids for part in parts])
    keys = merge([part.keys for part in parts])
    assert tokens is not None and document_ids is not None and position_ids is not None and keys is not None
    return Rows(
        tokens,
        document_ids,
        position_ids,
        merge([part.word_starts for part in parts]),
        keys,
        merge([part.token_type_ids for part in parts]),
        merge([part.next_sentence for part in parts]),
        merge([part.labels for part in parts], -100),
    )

"""From a step's number to this process's rows: who takes which rows of the global batch, and reading them ahead.

Global batch k is rows [k * G, (k + 1) * G) of the blended endless sequence, whatever the processes. A node takes its
entry of the batch table, the nodes in order; the processes of a node share its rows as evenly as they can.

Letters: G rows of a global batch, B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from terakoya.data.blending import Blend
from terakoya.data.rows import Rows, RowSource
from terakoya.errors import UserError

T = TypeVar("T")


def node_rows(table: Mapping[str, int], node: int) -> int:
    """The rows of an optimizer step that node number `node` takes: `{"-1": 256}` for one node, else an entry a node.

    Raises UserError for a table that is neither, and for a node that has no entry.
    """
    _check_table(table)
    name = "-1" if "-1" in table else str(node)
    if ("-1" in table and node != 0) or name not in table:
        raise UserError(
            f"batch_size: expected an entry for node {node}, got entries for {', '.join(table)}; "
            "give every node's rank an entry, or start the nodes that the table names"
        )
    return table[name]


def global_rows(table: Mapping[str, int]) -> int:
    """G, the rows of a global batch: the table's sum. Raises UserError as `node_rows` does."""
    _check_table(table)
    return sum(table.values())


def share(rows: int, processes: int, local_rank: int) -> tuple[int, int]:
    """The part [start, stop) of a node's rows that its process `local_rank` takes: 100 over 3 is 34, 33 and 33."""
    assert 0 <= local_rank < processes
    each, more = divmod(rows, processes)
    start = local_rank * each + min(local_rank, more)
    return start, start + each + (local_rank < more)


def rank_rows(table: Mapping[str, int], node: int, processes: int, local_rank: int) -> tuple[int, int]:
    """The part [start, stop) of a global batch that one process takes. Raises UserError as `node_rows` does."""
    rows = node_rows(table, node)
    before = 0 if "-1" in table else sum(table[str(each)] for each in range(node))
    start, stop = share(rows, processes, local_rank)
    return before + start, before + stop


def micro_batches(start: int, stop: int, micro_batch_size: int) -> list[tuple[int, int]]:
    """The rows [start, stop) in micro-batches [start, stop) of at most `micro_batch_size` rows, in order."""
    assert micro_batch_size > 0
    return [(first, min(first + micro_batch_size, stop)) for first in range(start, stop, micro_batch_size)]


class Loader:
    """The blended endless sequence of rows of several stores. No state: any row can be had at any time."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], *, rows_per_step: int) -> None:
        """`weights` are the stores' shares of rows; `rows_per_step` is G.

        Raises UserError for weights that are no shares, and for stores whose rows do not fit into one batch.
        """
        assert len(sources) == len(weights) and rows_per_step > 0
        first = sources[0]
        for number, source in enumerate(sources):
            where = f"{source.store.folder}: in one blend with {first.store.folder}"
            if source.store.facts.vocabulary != first.store.facts.vocabulary:
                raise UserError(f"{where}: expected the same vocabulary; prepare both with the same tokenizer")
            if source.store.facts.word_starts != first.store.facts.word_starts:
                raise UserError(f"{where}: expected word starts in both or neither; prepare both alike")
            assert (source.layout, source.sequence_length) == (first.layout, first.sequence_length)
            assert source.store_index == number, "a source's keys name its place in the blend"
        self.sources = tuple(sources)
        self.blend = Blend(weights)
        self.rows_per_step = rows_per_step

    def load(self, start: int, stop: int) -> Rows:
        """The rows [start, stop) of the endless sequence as one batch (stop - start, T)."""
        stores, indices = self.blend.positions(start, stop)
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

    def rows(self, step: int, start: int, stop: int, micro_batch_size: int | None = None) -> Iterator[Rows]:
        """The rows [start, stop) of global batch `step` in micro-batches; without a size as one (none if empty)."""
        begin = step * self.rows_per_step
        for first, last in micro_batches(begin + start, begin + stop, micro_batch_size or max(1, stop - start)):
            yield self.load(first, last)

    def blank(self) -> Rows:
        """One row with nothing to learn, for the empty slots of a step; its counts are to be taken as 0."""
        return self.sources[0].blank()

    def consumed(self, steps: int) -> list[dict[str, int | str]]:
        """Where training stands after `steps` steps, a record for each store: rows taken, whole epochs, rows in the
        current one."""
        records: list[dict[str, int | str]] = []
        for source, taken in zip(self.sources, self.blend.taken(steps * self.rows_per_step), strict=True):
            epoch, position = divmod(taken, len(source))
            folder = str(source.store.folder)
            records.append({"store": folder, "rows": taken, "epoch": epoch, "position": position})
        return records


def validation_rows(source: RowSource, batches: int, batch_rows: int, start: int, stop: int) -> Iterator[Rows]:
    """The part [start, stop) of each of the first `batches` batches of `batch_rows` rows of a store, in fixed order
    (a source with `shuffle=False`) and always with the same keys. Ends early where the store does; then, and for an
    empty part, a batch may be shorter or left out."""
    assert not source.shuffle and 0 <= start <= stop <= batch_rows
    for batch in range(min(batches, -(-len(source) // batch_rows))):
        first = batch * batch_rows + start
        last = min(batch * batch_rows + stop, len(source))
        if first < last:
            yield source.load(0, np.arange(first, last))


class Prefetcher(Generic[T]):
    """`function(first_step)`, `function(first_step + 1)`, ... computed ahead by one background thread.

    Iterate over it, or call `next`; close it when done (it is a context manager). What the function raises is raised
    in the consumer at the step it belongs to, after which there are no more items.
    """

    def __init__(
        self, function: Callable[[int], T], first_step: int, *, last_step: int | None = None, ahead: int = 2
    ) -> None:
        """Keeps up to `ahead` items ready; ends before `last_step` where one is given."""
        self._function = function
        self._items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=max(1, ahead))
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=self._work, args=(first_step, last_step), name="terakoya-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended or self._closed.is_set():
            raise StopIteration
        item, error = self._items.get()
        if error is not None:
            self._ended = True
            raise error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the thread and waits until it has left. May be called twice."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, step: int, last_step: int | None) -> None:
        while not self._closed.is_set():
            entry: tuple[T | None, BaseException | None]
            try:
                entry = (None, StopIteration()) if step == last_step else (self._function(step), None)
            except BaseException as error:  # noqa: BLE001 - raised again in the consumer
                entry = (None, error)
            while not self._closed.is_set():
                try:
                    self._items.put(entry, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if entry[1] is not None:
                return
            step += 1


def _check_table(table: Mapping[str, int]) -> None:
    """Raises UserError unless the table is {"-1": rows} or has an entry for each of nodes 0 to n - 1, rows > 0."""
    expected = ["-1"] if "-1" in table else [str(node) for node in range(len(table))]
    if not table or sorted(table) != sorted(expected) or any(rows < 0 for rows in table.values()):
        raise UserError(
            'batch_size: expected {"-1": rows} for one node, or one entry for each node rank from "0" on, rows >= 0; '
            f"got {dict(table)}"
        )
    if sum(table.values()) == 0:
        raise UserError("batch_size: expected at least one row in a step, got 0")


def _merge(parts: Sequence[Rows], places: np.ndarray, source: RowSource) -> Rows:
    """Batches put together as one: row i of all parts in order goes to places[i]. Narrow ones are padded."""
    width = max(part.tokens.shape[1] for part in parts)
    pad = source.vocabulary.pad
    assert pad is not None

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
    )

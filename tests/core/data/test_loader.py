"""The loader: global batch k is the same rows whoever asks and however it is split."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import PAD, small_store

from terakoya.data.loader import (
    Loader,
    Prefetcher,
    global_rows,
    micro_batches,
    node_rows,
    rank_rows,
    share,
    validation_rows,
)
from terakoya.data.rows import Layout, Rows, RowSource
from terakoya.errors import UserError

G = 24


@pytest.fixture(scope="module", params=["packed", "stream", "lines", "pairs"])
def loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    folder = tmp_path_factory.mktemp("stores")
    sources = []
    for number, count in enumerate((9, 30, 4)):
        documents = [[(5 * d + 3 * n + number) % 20 + 1 for n in range(d % 4 + 1)] for d in range(count)]
        store = small_store(folder / f"{number}", documents)
        sources.append(
            RowSource(store, Layout(request.param), sequence_length=16, seed=7, store_index=number)  # type: ignore[arg-type]
        )
    return Loader(sources, [2, 5, 1], rows_per_step=G)


def row_list(batches: list[Rows]) -> list[tuple[int, ...]]:
    """Each row as its key and everything else about it, padding left out."""
    found = []
    for rows in batches:
        for number in range(len(rows)):
            used = rows.document_ids[number] >= 0
            assert np.all(rows.tokens[number][~used] == PAD)
            arrays = [rows.tokens, rows.document_ids, rows.position_ids, rows.word_starts, rows.token_type_ids]
            parts = [array[number][used] for array in arrays if array is not None]
            label = [] if rows.next_sentence is None else [int(rows.next_sentence[number])]
            found.append((int(rows.keys[number]), *label, *np.concatenate(parts).tolist()))
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 200),
    st.lists(st.integers(0, G), max_size=5).map(sorted),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_global_batch_is_the_same_rows_however_split(
    loader: Loader, step: int, cuts: list[int], processes: int, size: int
) -> None:
    whole = row_list([loader.load(step * G, (step + 1) * G)])
    assert len(whole) == G
    nodes = np.diff([0, *cuts, G]).tolist()
    table = {str(node): rows for node, rows in enumerate(nodes)} if len(nodes) > 1 else {"-1": G}
    split: list[tuple[int, ...]] = []
    for node in range(len(nodes)):
        for local_rank in range(processes):
            start, stop = rank_rows(table, node, processes, local_rank)
            batches = list(loader.rows(step, start, stop, size))
            assert all(len(rows) <= size for rows in batches)
            split += row_list(batches)
    assert split == whole


def test_each_store_goes_through_its_own_epochs(loader: Loader) -> None:
    """Rows of each store come in whole epochs, in the order that the store itself gives."""
    rows = 3 * G * 20
    everything = row_list(list(loader.rows(0, 0, rows, 97)))
    stores, _ = loader.blend.positions(0, rows)
    for number, source in enumerate(loader.sources):
        mine = [row for row, store in zip(everything, stores.tolist(), strict=True) if store == number]
        epochs = -(-len(mine) // len(source))
        alone = [row for epoch in range(epochs) for row in row_list([source.load(epoch, np.arange(len(source)))])]
        assert mine == alone[: len(mine)]
    consumed = loader.consumed(60)
    assert [record["rows"] for record in consumed] == [int(np.sum(stores == each)) for each in range(3)]
    assert all(
        record["rows"] == record["epoch"] * len(source) + record["position"]  # type: ignore[operator]
        for record, source in zip(consumed, loader.sources, strict=True)
    )


def test_stores_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    first = small_store(tmp_path / "a", [[5], [6]])
    for name, other in (
        ("vocabulary", small_store(tmp_path / "b", [[5], [6]], size=50_000)),
        ("word starts", small_store(tmp_path / "c", [[5], [6]], words=False)),
    ):
        sources = [
            RowSource(store, Layout("packed"), sequence_length=16, seed=7, store_index=number)  # type: ignore[arg-type]
            for number, store in enumerate([first, other])
        ]
        with pytest.raises(UserError, match=name):
            Loader(sources, [1, 1], rows_per_step=4)


def test_validation_rows_are_fixed_and_whole(tmp_path: Path) -> None:
    store = small_store(tmp_path, [[9]] * 50)
    source = RowSource(store, Layout("lines"), sequence_length=16, seed=7, shuffle=False)  # type: ignore[arg-type]
    everything = row_list([source.load(0, np.arange(len(source)))])
    assert row_list(list(validation_rows(source, 3, 8, 0, 8))) == everything[:24]
    assert row_list(list(validation_rows(source, 100, 8, 0, 8))) == everything, "the store ends first"
    parts = [row_list(list(validation_rows(source, 100, 8, *share(8, 3, rank)))) for rank in range(3)]
    assert sorted(row for part in parts for row in part) == sorted(everything)


def test_batch_tables() -> None:
    assert [share(100, 3, rank) for rank in range(3)] == [(0, 34), (34, 67), (67, 100)]
    table = {"0": 100, "1": 100, "2": 56}
    assert [node_rows(table, node) for node in range(3)] == [100, 100, 56] and global_rows(table) == 256
    assert node_rows({"-1": 256}, 0) == 256
    assert rank_rows(table, 2, 5, 4) == (245, 256)
    assert micro_batches(34, 67, 10) == [(34, 44), (44, 54), (54, 64), (64, 67)] and micro_batches(5, 5, 3) == []


@pytest.mark.parametrize("table", [{}, {"1": 5}, {"-1": 5, "0": 5}, {"0": -1}, {"0": 0}, {"a": 5}, {"0": 5, "2": 5}])
def test_bad_batch_tables_are_refused(table: dict[str, int]) -> None:
    with pytest.raises(UserError, match="batch_size"):
        node_rows(table, 0)


def test_a_node_without_an_entry_is_refused() -> None:
    for table, node in (({"-1": 256}, 1), ({"0": 5, "1": 5}, 2)):
        with pytest.raises(UserError, match=f"node {node}"):
            node_rows(table, node)


def test_prefetcher_gives_items_in_order_and_reads_ahead() -> None:
    calls: list[int] = []

    def function(step: int) -> int:
        calls.append(step)
        return step * 10

    with Prefetcher(function, 5, last_step=9, ahead=2) as items:
        assert next(items) == 50
        deadline = time.monotonic() + 5
        while len(calls) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert calls == [5, 6, 7, 8], "one taken, two ready, one waiting"
        assert list(items) == [60, 70, 80]
        assert list(items) == []


def test_prefetcher_carries_errors_to_their_step() -> None:
    def function(step: int) -> int:
        if step == 2:
            raise UserError("no such row")
        return step

    items = Prefetcher(function, 0)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(UserError, match="no such row"):
        next(items)
    assert list(items) == []
    items.close()


def test_prefetcher_closes_while_it_waits() -> None:
    before = threading.active_count()
    items = Prefetcher(lambda step: step, 0, ahead=1)
    next(items)
    items.close()
    items.close()
    assert threading.active_count() == before and list(items) == []

"""The loader: global batch k is the same rows for any number of processes and any split."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import PAD, small_store

from terakoya.components.rows import Layout, Rows
from terakoya.distributed.topology import ProcessInfo, Topology, rank_batches
from terakoya.errors import UserError
from terakoya.rows.blending import Blend
from terakoya.rows.loader import Loader, Prefetcher, Stage
from terakoya.rows.row_source import RowSource

G = 24


@pytest.fixture(scope="module", params=["packed", "stream", "lines", "pairs"])
def loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    folder = tmp_path_factory.mktemp("stores")
    sources = []
    for number, count in enumerate((9, 30, 4)):
        documents = [[(5 * d + 3 * n + number) % 20 + 1 for n in range(d % 4 + 1)] for d in range(count)]
        store = small_store(folder / f"{number}", documents)
        sources.append(
            RowSource(store, Layout(request.param), sequence_length=16, seed=7, store_id=number)  # type: ignore[arg-type]
        )
    return Loader(sources, [2, 5, 1])


def row_list(batches: list[Rows]) -> list[tuple[int, ...]]:
    """Each row as its key and all its arrays, without padding."""
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


@settings(max_examples=10)
@given(
    st.integers(0, 200),
    st.lists(st.integers(1, G - 1), max_size=4, unique=True).map(sorted),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_a_global_batch_has_the_same_rows_for_any_split(
    loader: Loader, step: int, cuts: list[int], processes: int, size: int
) -> None:
    whole = row_list([loader.load(step * G, (step + 1) * G)])
    assert len(whole) == G
    nodes = np.diff([0, *cuts, G]).tolist()
    table = {str(node): rows for node, rows in enumerate(nodes)} if len(nodes) > 1 else {"-1": G}
    places = [(node, local) for node in range(len(nodes)) for local in range(processes)]
    topology = Topology(tuple(ProcessInfo(rank, node, local, "host") for rank, (node, local) in enumerate(places)))
    split: list[tuple[int, ...]] = []
    for share in rank_batches(table, size, topology):
        batches = [loader.load(step * G + start, step * G + stop) for start, stop in share.micro_batches()]
        assert all(0 < len(rows) <= size for rows in batches)
        split += row_list(batches)
    assert split == whole


def test_each_store_has_its_own_epochs(loader: Loader) -> None:
    """Rows of each store come in whole epochs, in the order of its own row source."""
    rows = 3 * G * 20
    everything = row_list([loader.load(at, min(at + 97, rows)) for at in range(0, rows, 97)])
    stores, _ = Blend([2, 5, 1]).positions(0, rows)
    for number, source in enumerate(loader.sources):
        mine = [row for row, store in zip(everything, stores.tolist(), strict=True) if store == number]
        epochs = -(-len(mine) // len(source))
        alone = [row for epoch in range(epochs) for row in row_list([source.load(epoch, np.arange(len(source)))])]
        assert mine == alone[: len(mine)]
    consumed = loader.store_positions(rows)
    assert [record["rows"] for record in consumed] == [int(np.sum(stores == each)) for each in range(3)]
    assert all(
        record["rows"] == record["epoch"] * len(source) + record["position"]  # type: ignore[operator]
        for record, source in zip(consumed, loader.sources, strict=True)
    )


def test_a_stage_uses_other_stores_which_continue_where_they_were(loader: Loader) -> None:
    """Over three stages, each store gives its own rows in order, each once."""
    first, second, rows = 50, 131, 300
    staged = Loader(loader.sources, [2, 5, 0], stages=[Stage(first, {2: 1.0}), Stage(second, {0: 1.0, 2: 3.0})])
    everything = row_list([staged.load(at, min(at + 37, rows)) for at in range(0, rows, 37)])
    assert everything == row_list([staged.load(0, rows)]), "for any split"
    owners = [
        {row[0] for row in row_list([source.load(e, np.arange(len(source))) for e in range(99)])}
        for source in loader.sources
    ]
    stores = [next(number for number, keys in enumerate(owners) if row[0] in keys) for row in everything]
    assert stores[:first] == Blend([2, 5]).positions(0, first)[0].tolist()
    assert set(stores[first:second]) == {2}
    assert abs(stores[second:].count(2) - 0.75 * (rows - second)) < 1 and 1 not in stores[second:]
    for number, source in enumerate(loader.sources):
        mine = [row for row, store in zip(everything, stores, strict=True) if store == number]
        epochs = -(-len(mine) // len(source))
        alone = [row for epoch in range(epochs) for row in row_list([source.load(epoch, np.arange(len(source)))])]
        assert mine == alone[: len(mine)]
        consumed = [int(staged.store_positions(row)[number]["rows"]) for row in (first, second, rows)]
        assert consumed == [stores[:row].count(number) for row in (first, second, rows)]


def test_stores_that_cannot_be_mixed_are_refused(tmp_path: Path) -> None:
    first = small_store(tmp_path / "a", [[5], [6]])
    for name, other in (
        ("vocabulary", small_store(tmp_path / "b", [[5], [6]], size=50_000)),
        ("word starts", small_store(tmp_path / "c", [[5], [6]], words=False)),
    ):
        sources = [
            RowSource(store, Layout("packed"), sequence_length=16, seed=7, store_id=number)  # type: ignore[arg-type]
            for number, store in enumerate([first, other])
        ]
        with pytest.raises(UserError, match=name):
            Loader(sources, [1, 1])


def test_prefetcher_gives_items_in_order_and_reads_ahead() -> None:
    calls: list[int] = []

    def function(step: int) -> int:
        calls.append(step)
        return step * 10

    with Prefetcher(function, 5, last_step=9, ahead=2) as items:
        assert next(items) == 50
        deadline = time.monotonic() + 5
        while len(calls) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert calls == [5, 6, 7], "one used, two ready"
        assert list(items) == [60, 70, 80]
        assert list(items) == []


def test_prefetcher_wakes_its_thread_once_half_of_the_items_are_used() -> None:
    calls: list[int] = []

    def wait_for_calls(count: int) -> list[int]:
        deadline = time.monotonic() + 5
        while len(calls) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return calls

    with Prefetcher(calls.append, 0, ahead=4) as items:
        assert wait_for_calls(4) == [0, 1, 2, 3]
        next(items)
        assert wait_for_calls(4) == [0, 1, 2, 3]
        next(items)
        assert wait_for_calls(6) == [0, 1, 2, 3, 4, 5]
        next(items)
        next(items)
        assert wait_for_calls(8) == [*range(8)]


def test_prefetcher_raises_errors_at_their_step() -> None:
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

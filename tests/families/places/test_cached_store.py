"""A token store at an address: rows are those of the store on disk, blocks are fetched once, the cache stays small."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from selection import at_night

from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import FileError, TemporaryFailure, UserError
from terakoya.places import as_written
from terakoya.rows.row_source import RowSource
from terakoya.store.block_checksums import BLOCK_BYTES
from terakoya.store.subset import select_documents
from terakoya.store.token_store import TokenStore, open_store
from terakoya.store.writer import write_store
from terakoya_conversations.rows import Conversations
from terakoya_places import cached_store, fetched_blocks
from terakoya_places.cached_store import RemoteStore
from terakoya_places.object_folder import ObjectFolder

ENCODER = Vocabulary(size=5000, pad=0, unk=1, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4))
CAUSAL = Vocabulary(size=5000, pad=0, bos=1, eos=2, special=(0, 1, 2))
LAYOUTS: dict[str, tuple[str, Layout]] = {
    **{kind: ("encoder", Layout(kind)) for kind in ("packed", "stream", "lines", "pairs")},  # type: ignore[arg-type]
    **{
        f"causal {kind}": ("causal", Layout(kind, framing="causal", append_eos=False))  # type: ignore[arg-type]
        for kind in ("packed", "stream", "megatron")
    },
    "conversations": (
        "conversations",
        Layout("packed", framing="causal", append_eos=False, whole=Conversations()),
    ),
}
"""name -> the store that it reads, and the layout."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenStore]:
    """Stores of some blocks each, on disk."""
    draw = random.Random(1)
    folder = tmp_path_factory.mktemp("stores")
    documents = [
        [[draw.randrange(5, 5000) for _ in range(draw.randrange(20, 300))] for _ in range(3)] for _ in range(1000)
    ]
    bits = [[[token % 3 == 0 for token in line] for line in document] for document in documents]
    joined = [[[token for line in document for token in line]] for document in documents]
    answers = [[[token % 2 == 0 for token in line] for line in document] for document in joined]
    return {
        "encoder": write_store(folder / "encoder", documents, vocabulary=ENCODER, unit="line", word_starts=bits),
        "causal": write_store(folder / "causal", joined, vocabulary=CAUSAL, eos=2),
        "conversations": write_store(folder / "conversations", joined, vocabulary=CAUSAL, answers=answers),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached stores; nothing is fetched that no row asks for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cached_store, "fill", lambda files, stop, ended: ended())
    return tmp_path / "cache/terakoya/stores"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The ranges that were asked for."""
    asked: list[tuple[str, int, int]] = []
    real = ObjectFolder.read_range

    def read_range(self: ObjectFolder, name: str, start: int, stop: int) -> bytes:
        asked.append((name, start, stop))
        return real(self, name, start, stop)

    monkeypatch.setattr(ObjectFolder, "read_range", read_range)
    return asked


@pytest.fixture
def there(stores: dict[str, TokenStore]) -> Iterator[Callable[[str], Path]]:
    """name of a store -> its address in the memory of this process."""
    system = fsspec.filesystem("memory")

    def put(name: str) -> Path:
        for file in stores[name].folder.rglob("*"):
            if file.is_file() and "plans" not in file.parts:
                system.pipe(f"/stores/{name}/{file.relative_to(stores[name].folder)}", file.read_bytes())
        return Path(f"memory://stores/{name}")

    yield put
    system.rm("/stores", recursive=True)


def allow(store: TokenStore, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cache as large as the small files of `store` and `share` of its data."""
    files = store.facts.files
    data = sum(facts.size for name, facts in store.facts.data_files.items() if name != "tokens.idx")
    small = sum(facts.size for facts in files.values()) - data
    monkeypatch.setenv(cached_store.LIMIT_VARIABLE, str((small + share * data) / 1e9))


@pytest.mark.parametrize(
    ("name", "share"),
    at_night(
        itertools.product(LAYOUTS, (1.5, 0.4)),
        always=[("packed", 1.5), ("pairs", 0.4), ("causal megatron", 0.4), ("conversations", 0.4)],
    ),
)
def test_rows_are_those_of_the_store_on_disk(
    name: str,
    share: float,
    stores: dict[str, TokenStore],
    there: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, layout = LAYOUTS[name]
    local = stores[kind]
    monkeypatch.setattr(cached_store, "LEAST_BLOCKS", 1)
    allow(local, share, monkeypatch)
    remote = open_store(there(kind))
    assert isinstance(remote, RemoteStore) and (remote.budget_bytes is None) == (share > 1)
    first, last = local.facts.documents // 4, local.facts.documents
    for here, fetched in (
        (local, remote),
        (select_documents(local, first, last), select_documents(remote, first, last)),
    ):
        rows = [RowSource(store, layout, sequence_length=128, seed=7) for store in (here, fetched)]
        for start in range(0, len(rows[0]), 200):
            positions = np.arange(start, min(start + 200, len(rows[0])))
            for got, expected in zip(*(vars(each.load(1, positions)).values() for each in rows), strict=True):
                assert np.array_equal(got, expected)
            assert np.array_equal(*(each.documents(1, positions) for each in rows))
    if remote.budget_bytes is not None:
        remote.ids(0, 1)
        disk = sum(512 * (remote.data_folder / file).stat().st_blocks for file in remote._fetched_files)
        assert 0 < disk <= remote.budget_bytes + BLOCK_BYTES


def test_a_block_is_fetched_once_and_serves_the_next_run(
    there: Callable[[str], Path], requests: list[tuple[str, int, int]], stores: dict[str, TokenStore]
) -> None:
    address = there("encoder")
    store = open_store(address)
    assert store.name == "memory://stores/encoder" and not requests
    assert np.array_equal(store.ids(10, 20), stores["encoder"].ids(10, 20))
    assert requests == [
        ("tokens.bin", 0, BLOCK_BYTES),
        ("tokens.words", 0, stores["encoder"].facts.files["tokens.words"].size),
    ]
    store.ids(100, 200)
    assert np.array_equal(store.word_starts(0, 500), stores["encoder"].word_starts(0, 500))
    assert len(requests) == 2
    whole = store.ids(0, store.facts.tokens)
    assert np.array_equal(whole, stores["encoder"].tokens)
    assert [stop - start for _, start, stop in requests[2:]] == [
        stores["encoder"].facts.files["tokens.bin"].size - BLOCK_BYTES
    ]
    requests.clear()
    again = pickle.loads(pickle.dumps(open_store(address)))
    assert np.array_equal(again.ids(0, store.facts.tokens), whole) and not requests


def test_what_an_interrupted_process_has_left_is_fetched_again(
    there: Callable[[str], Path], requests: list[tuple[str, int, int]], stores: dict[str, TokenStore]
) -> None:
    address = there("encoder")
    store = open_store(address)
    store.ids(0, store.facts.tokens)
    requests.clear()
    file = store.data_folder / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[BLOCK_BYTES + 5] ^= 1  # written in part
    file.write_bytes(content)
    again = open_store(address)
    assert np.array_equal(again.ids(0, store.facts.tokens), stores["encoder"].tokens)
    assert requests == [("tokens.bin", BLOCK_BYTES, 2 * BLOCK_BYTES)]


def test_the_rest_is_fetched_in_the_background(
    there: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, stores: dict[str, TokenStore]
) -> None:
    monkeypatch.setattr(cached_store, "fill", fetched_blocks.fill)
    store = open_store(there("encoder"))
    store.ids(0, 1)
    deadline = time.monotonic() + 20
    while any(file.remaining for file in store._fetched_files.values()):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (store.data_folder / "tokens.bin").read_bytes() == (stores["encoder"].folder / "tokens.bin").read_bytes()


def test_damage_there_is_named(there: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address = there("encoder")
    folder = ObjectFolder(as_written(address))
    content = bytearray(folder.read("tokens.bin"))
    content[3 * BLOCK_BYTES + 7] ^= 1
    folder.write("tokens.bin", bytes(content))
    store = open_store(address)
    store.ids(0, 1)
    with pytest.raises(UserError, match=r"memory://stores/encoder/tokens\.bin: block 3 .*damaged since the store was"):
        store.ids(0, store.facts.tokens)
    shutil.rmtree(store.local_folder)
    folder.write("tokens.idx", folder.read("tokens.idx")[:-8] + bytes(8))
    with pytest.raises(UserError, match=r"tokens\.idx: content changed since the store was made; copy it there again"):
        open_store(address)
    folder.remove(["tokens.idx"])
    with pytest.raises(UserError, match=r"tokens\.idx: no such object; the store is incomplete"):
        open_store(address)
    with pytest.raises(
        UserError, match=r"memory://stores/nothing: expected a finished token store, found no store\.json"
    ):
        open_store(Path("memory://stores/nothing"))
    folder.write("store.json", b"{}")
    with pytest.raises(UserError, match=r"memory://stores/encoder/store\.json: expected the SHA-256"):
        open_store(address)


def test_a_request_that_fails_is_made_again(there: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_blocks, "PAUSES", (0.0,) * 4)
    store = open_store(there("encoder"))
    failures = [fetched_blocks.ATTEMPTS - 1]
    real = ObjectFolder.read_range

    def read_range(self: ObjectFolder, *arguments: Any) -> bytes:
        if failures[0]:
            failures[0] -= 1
            raise TemporaryFailure("the store does not answer")
        return real(self, *arguments)

    monkeypatch.setattr(ObjectFolder, "read_range", read_range)
    store.ids(0, 10)
    failures[0] = 10**6
    with pytest.raises(TemporaryFailure, match="the store does not answer"):
        store.ids(0, store.facts.tokens)


def test_room_is_made_by_stores_that_nobody_uses(
    there: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch, stores: dict[str, TokenStore]
) -> None:
    used = open_store(there("causal"))
    used.ids(0, used.facts.tokens)
    unused = open_store(there("conversations"))
    unused.ids(0, unused.facts.tokens)
    left = unused.local_folder
    del unused
    assert left.is_dir()
    size = sum(facts.size for each in ("causal", "encoder") for facts in stores[each].facts.files.values())
    monkeypatch.setenv(cached_store.LIMIT_VARIABLE, str((size + 200_000) / 1e9))
    store = open_store(there("encoder"))
    assert isinstance(store, RemoteStore) and store.budget_bytes is None
    assert not left.exists() and used.local_folder.is_dir()
    monkeypatch.setenv(cached_store.LIMIT_VARIABLE, "0.0001")
    with pytest.raises(UserError, match=r"expected room for 0\.00 GB, a token store, .*TERAKOYA_CACHE_GB"):
        open_store(there("conversations"))


@pytest.mark.parametrize("limit", ["", "50GB", "nan"])
def test_a_limit_of_the_cache_is_a_number(
    limit: str, there: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cached_store.LIMIT_VARIABLE, limit)
    if not limit:
        assert open_store(there("causal")).facts.tokens
        return
    with pytest.raises(UserError, match=f'TERAKOYA_CACHE_GB: expected a number of GB, such as 50, got "{limit}"'):
        open_store(there("causal"))


def test_a_store_that_is_in_use_keeps_the_room_that_it_will_need(
    there: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, stores: dict[str, TokenStore]
) -> None:
    """The stores of a mixture are all opened before much of any is here."""
    monkeypatch.setattr(cached_store, "LEAST_BLOCKS", 1)
    sizes = {name: sum(facts.size for facts in store.facts.files.values()) for name, store in stores.items()}
    monkeypatch.setenv(cached_store.LIMIT_VARIABLE, str((sizes["causal"] + 0.7 * sizes["encoder"]) / 1e9))
    first = open_store(there("causal"))
    second = open_store(there("encoder"))
    assert isinstance(first, RemoteStore) and first.budget_bytes is None
    assert isinstance(second, RemoteStore) and second.budget_bytes is not None
    assert second.budget_bytes < 0.7 * sizes["encoder"]
    del first, second
    alone = open_store(there("encoder"))  # what nobody uses keeps nothing but what it has
    assert isinstance(alone, RemoteStore) and alone.budget_bytes is None


def test_a_store_that_is_removed_while_it_is_opened_is_made_again(
    there: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = cached_store.fcntl.flock, []

    def flock(handle: Any, how: int) -> None:
        if how == cached_store.fcntl.LOCK_SH and not removed:
            removed.extend(cache.glob("encoder-*"))
            shutil.rmtree(removed[0])  # as another process does that has found it without a lock
        real(handle, how)

    monkeypatch.setattr(cached_store.fcntl, "flock", flock)
    assert len(open_store(there("encoder")).ids(0, 10)) == 10 and removed


def test_a_full_disk_names_the_file_and_what_to_do(
    there: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store(there("encoder"))
    monkeypatch.setattr(fetched_blocks.os, "pwrite", pwrite)
    with pytest.raises(FileError, match=rf"{cache}/encoder-.*/tokens.bin: No space left on device.*free some space"):
        store.ids(0, 10)


def test_what_is_read_stays_while_it_is_read(
    there: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, stores: dict[str, TokenStore]
) -> None:
    monkeypatch.setattr(cached_store, "LEAST_BLOCKS", 1)
    allow(stores["causal"], 0.3, monkeypatch)
    store = open_store(there("causal"))
    with pytest.raises(AssertionError, match="read without saying so"):
        store.touch(np.array([0]), 1)
    begun, may_end = threading.Event(), threading.Event()
    same: list[bool] = []

    def read_slowly(store: TokenStore) -> None:
        with store.reading():
            store.touch(np.array([0]), 10)
            begun.set()
            may_end.wait(20)
            same.append(bool(np.array_equal(store.tokens[:10], stores["causal"].tokens[:10])))

    reader = threading.Thread(target=read_slowly, args=(store,))
    reader.start()
    assert begun.wait(20)
    for start in range(0, store.facts.tokens, 1000):
        store.ids(start, min(start + 1000, store.facts.tokens))
    may_end.set()
    reader.join()
    assert same == [True]
    before = store._fetched_files["tokens.bin"].absent[0]  # type: ignore[attr-defined]
    store.ids(store.facts.tokens - 1000, store.facts.tokens)
    for start in range(0, store.facts.tokens, 1000):
        store.ids(start, min(start + 1000, store.facts.tokens))
    assert not before and store._fetched_files["tokens.bin"].absent[0]  # type: ignore[attr-defined]
    own = store.data_folder
    assert own.is_dir() and own != store.local_folder
    del store
    assert not own.exists()


def test_plans_that_are_there_are_fetched(
    there: Callable[[str], Path], stores: dict[str, TokenStore], requests: list[tuple[str, int, int]]
) -> None:
    layout = LAYOUTS["causal packed"][1]
    RowSource(stores["causal"], layout, sequence_length=64, seed=1)
    address = there("causal")
    system = fsspec.filesystem("memory")
    for file in (stores["causal"].folder / "plans").rglob("*"):
        if file.is_file():
            system.pipe(f"/stores/causal/{file.relative_to(stores['causal'].folder)}", file.read_bytes())
    store = open_store(address)
    RowSource(store, layout, sequence_length=64, seed=1)
    assert not requests, "with stored ends, a plan that is built reads every document"
    assert os.environ["XDG_CACHE_HOME"] in str(store.local_folder)

"""Everything in a store that decides what is trained is under a hash: damage ends what reads it, and `verify` finds
it."""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_preparation import prepare_corpus
from small_store import damage, rewrite_store_json
from word_tokenizer import WordTokenizer, make_folder

from terakoya.components.rows import Layout
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.rows.row_source import RowSource
from terakoya.store.subset import select_documents
from terakoya.store.token_store import TokenStore, read_facts
from terakoya.store.writer import write_store
from terakoya_checks.verify_store import verify

LAYOUT = Layout("packed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared store with a packing plan, rejects and a tokenizer of two files."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = make_folder(folder / "tokenizer")
    (tokenizer / "merges.txt").write_text("a b\n" * 100)
    words = random.Random(0)
    texts = [" ".join(f"w{words.randrange(500)}" for _ in range(40)) for _ in range(200)]
    (folder / "a.txt").write_bytes(b"\n\n".join([*(text.encode() for text in texts), b"\xff"]))
    prepare_corpus(Corpus([folder / "a.txt"]), WordTokenizer(), tokenizer, folder / "store", max_rejects=1)
    RowSource(TokenStore.open(folder / "store"), LAYOUT, sequence_length=64, seed=0)
    assert verify(folder / "store") == []
    return folder / "store"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def read_all(folder: Path) -> np.ndarray:
    """Returns all rows of the store, as training reads them."""
    source = RowSource(TokenStore.open(folder), LAYOUT, sequence_length=64, seed=0)
    return source.load(0, np.arange(len(source))).tokens


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_a_percent(file: Path) -> None:
    content = np.fromfile(file, np.uint8)
    changed = np.random.default_rng(0).random(len(content)) < 0.01
    changed[-1] = True
    content[changed] ^= 1
    content.tofile(file)


DAMAGES: list[Callable[[Path], None]] = [damage, halve, change_a_percent, Path.unlink]
TRAINED = ["store.json", "tokens.bin", "tokens.words", "tokens.checksums", "tokenizer/size.txt", "tokenizer/merges.txt"]
PLAN = ["plan.json", "rows.bin", "starts.bin", "lengths.bin"]


@pytest.mark.parametrize("how", DAMAGES, ids=lambda how: how.__name__)
@pytest.mark.parametrize("name", [*TRAINED, "tokens.idx", "rejects.jsonl", *PLAN])
def test_damage_is_found(store: Path, name: str, how: Callable[[Path], None]) -> None:
    rows = read_all(store)
    file = next(store.glob(f"plans/*/{name}")) if name in PLAN else store / name
    how(file)
    if (how, name) == (Path.unlink, "store.json"):
        with pytest.raises(UserError, match="expected a finished token store"):
            verify(store)
    elif (how, name) != (Path.unlink, "plan.json"):  # then there is no plan
        assert any(file.name in fault for fault in verify(store))
    if name in TRAINED:
        with pytest.raises(UserError, match=file.name):
            read_all(store)
    else:  # a plan is built again; rows of a plan need no index
        if name != "tokens.idx":
            np.testing.assert_array_equal(read_all(store), rows)
            assert (verify(store) == []) == (name in PLAN)


def test_a_file_added_to_the_tokenizer_is_found(store: Path) -> None:
    (store / "tokenizer" / ".DS_Store").touch()
    assert verify(store) == []
    (store / "tokenizer" / "added_tokens.json").write_text("{}")
    with pytest.raises(UserError, match=r"added_tokens\.json: was not there when the store was made; remove it"):
        TokenStore.open(store)
    assert len(verify(store)) == 1


@pytest.mark.parametrize(
    "flips", [pytest.param(200, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.nightly)]
)
def test_no_changed_bit_of_store_json_is_believed(store: Path, flips: int) -> None:
    file, facts = store / "store.json", read_facts(store)
    content, draw, refused = file.read_bytes(), random.Random(flips), 0
    for _ in range(flips):
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        try:
            assert read_facts(store) == facts
        except UserError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 0.9 * flips


def test_verify_compares_the_fingerprint_with_the_facts(store: Path) -> None:
    rewrite_store_json(store, unit="line")
    assert any("fingerprint" in fault for fault in verify(store))


# --------------------------------------------------------------------------------------------------- blocks of files


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """A store whose ids are 5 blocks, and its index several: 5,000 documents of 60 tokens."""
    ids = np.random.default_rng(0).integers(10, 1000, (5000, 60))
    vocabulary = Vocabulary(size=1000, pad=0, unk=1, cls=2, sep=3, mask=4, special=tuple(range(10)))
    folder = tmp_path_factory.mktemp("large") / "store"
    return write_store(
        folder, ([row] for row in ids), vocabulary=vocabulary, word_starts=([row % 2 == 0] for row in ids)
    )


def change_bit(file: Path, byte: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        old = stream.read(1)[0]
        stream.seek(byte)
        stream.write(bytes([old ^ 1]))


def test_a_damaged_block_ends_what_reads_it(large: TokenStore, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(large.folder, tmp_path / "store"))
    change_bit(folder / "tokens.bin", 300_000)  # in block 2 of 0 to 4: token 150,000
    message = r"tokens\.bin: block 2 \(bytes 262,144 to 393,216\): damaged since the store was made"
    store = TokenStore.open(folder)
    source = RowSource(store, Layout("stream"), sequence_length=64, seed=0, shuffle=False)
    for stop in (2000, 4500):  # rows of 62 tokens and separators
        source.load(0, np.arange(stop - 10, stop))
    with pytest.raises(UserError, match=message):
        source.load(0, np.arange(2400, 2460))
    (fault,) = verify(folder)
    assert fault.startswith(f"{folder / 'tokens.bin'}: content changed") and fault.endswith("blocks of 128 KiB: 2")
    second = select_documents(TokenStore.open(folder), 2400, 2600)
    with pytest.raises(UserError, match=message):
        second.ids(0, 12_000)
    causal = RowSource(TokenStore.open(folder), Layout("stream", framing="causal"), sequence_length=64, seed=0)
    with pytest.raises(UserError, match=message):
        causal.load(0, np.arange(len(causal)))


@pytest.mark.parametrize("document", [0, 1, 2499, 2500, 4998])
def test_a_damaged_index_ends_what_reads_it(large: TokenStore, tmp_path: Path, document: int) -> None:
    """Also where the damage leads the search for a document astray."""
    folder = Path(shutil.copytree(large.folder, tmp_path / "store"))
    documents_at = 34 + 12 * 5000
    change_bit(folder / "tokens.idx", documents_at + 8 * (document + 1) + 1)  # 256 more or less
    whole, damaged = (
        RowSource(store, Layout("stream"), sequence_length=64, seed=0) for store in (large, TokenStore.open(folder))
    )
    wrong = 0
    for row in range(0, len(whole), 250):
        try:
            loaded = damaged.load(0, np.array([row])).tokens
        except UserError as error:
            assert "tokens.idx: block" in str(error)
            wrong += 1
        else:
            np.testing.assert_array_equal(loaded, whole.load(0, np.array([row])).tokens)
    with pytest.raises(UserError, match=r"tokens\.idx: block"):
        damaged.load(0, np.arange(len(whole)))
    assert wrong


def test_a_block_is_compared_once_and_only_if_it_is_read(large: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    compute = zlib.crc32

    def count(content: memoryview) -> int:
        sizes.append(len(content))
        return compute(content)

    monkeypatch.setattr("terakoya.store.block_checksums.zlib.crc32", count)
    store = TokenStore.open(large.folder)
    store.ids(0, 10)
    assert sizes == [131_072, 37_500], "a block of ids, and all word starts"
    store.ids(100, 65_536)
    assert len(sizes) == 2
    store.ids(65_535, 300_000)
    assert len(sizes) == 6
    store.touch(np.array([0, 7]), np.array([300_000, 0]))
    assert len(sizes) == 6

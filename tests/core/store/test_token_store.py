"""The token store's files are Megatron's to the byte, and every damage to them is detected."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import tempfile
import time
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import rewrite_store_json

import terakoya.store.writer as store_writer
from terakoya.atomic_files import lock_folder
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore, Unit
from terakoya.store.writer import write_store
from terakoya_checks.verify_store import verify

DOCUMENTS = [[[7, 8], [9]], [[1, 2, 3, 4]]]
WORDS = [[[True, False], [True]], [[True, True, False, True]]]


def read_megatron(folder: Path) -> tuple[list[list[int]], list[int]]:
    """Reads sequences and document index of `folder` using only the published layout."""
    raw = (folder / "tokens.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", raw[9:17])
    (code,) = struct.unpack("<B", raw[17:18])
    count, entries = struct.unpack("<QQ", raw[18:34])
    assert version == 1
    letter, size = {4: ("i", 4), 8: ("H", 2)}[code]
    lengths = struct.unpack(f"<{count}i", raw[34 : 34 + 4 * count])
    pointers = struct.unpack(f"<{count}q", raw[34 + 4 * count : 34 + 12 * count])
    documents = struct.unpack(f"<{entries}q", raw[34 + 12 * count :])
    data = (folder / "tokens.bin").read_bytes()
    sequences = [
        list(struct.unpack(f"<{length}{letter}", data[pointer : pointer + size * length]))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return sequences, list(documents)


def test_line_units_to_the_byte(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocabulary=Vocabulary(size=10), unit="line", word_starts=WORDS)
    expected = b"MMIDIDX\0\0" + bytes.fromhex("01000000000000000803000000000000000300000000000000")
    expected += bytes.fromhex("020000000100000004000000")
    expected += bytes.fromhex("000000000000000004000000000000000600000000000000")
    expected += bytes.fromhex("000000000000000002000000000000000300000000000000")
    assert (store.folder / "tokens.idx").read_bytes() == expected
    assert (store.folder / "tokens.bin").read_bytes() == bytes.fromhex("0700080009000100020003000400")
    # 1 0 1 1 1 0 1, the first token in the lowest bit
    assert (store.folder / "tokens.words").read_bytes() == bytes([0b1011101])
    assert store.offsets.tolist() == [0, 2, 3, 7]
    assert store.documents.tolist() == [0, 2, 3]
    assert store.word_starts(1, 5).tolist() == [False, True, True, True]
    assert store.facts.documents == 2 and store.facts.sequences == 3 and store.facts.tokens == 7


def test_document_units_with_eos_in_four_bytes(tmp_path: Path) -> None:
    vocabulary = Vocabulary(size=70_000, eos=69_999)
    store = write_store(tmp_path / "s", [*DOCUMENTS, []], vocabulary=vocabulary, eos=69_999, word_starts=[*WORDS, []])
    raw = (store.folder / "tokens.idx").read_bytes()
    assert raw[17] == 4
    assert read_megatron(store.folder) == ([[7, 8, 9, 69_999], [1, 2, 3, 4, 69_999]], [0, 1, 2])
    assert store.word_starts(0, 9).tolist() == [True, False, True, True, True, True, False, True, True]


@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 99_999), max_size=6), max_size=4), min_size=1, max_size=12),
    unit=st.sampled_from(["document", "line"]),
    size=st.sampled_from([60_000, 100_000]),
    with_eos=st.booleans(),
    part_tokens=st.integers(1, 20),
    data=st.data(),
)
def test_a_written_store_reads_back(
    documents: list[list[list[int]]], unit: Unit, size: int, with_eos: bool, part_tokens: int, data: st.DataObject
) -> None:
    documents = [[[token % size for token in line] for line in document] for document in documents]
    if not any(line for document in documents for line in document):
        documents[0].append([1])
    words = [[[data.draw(st.booleans()) for _ in line] for line in document] for document in documents]
    eos = 3 if with_eos else None
    expected, expected_words, index = [], [], [0]
    for document, flags in zip(documents, words, strict=True):
        lines = [list(line) for line in document if line]
        if not lines:
            continue
        expected_words += [flag for line in flags for flag in line] + [True] * with_eos
        lines[-1] += [3] * with_eos
        expected += lines if unit == "line" else [list(chain(*lines))]
        index.append(len(expected))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_writer, "_PART_TOKENS", part_tokens)
        store = write_store(
            Path(folder) / "s",
            documents,
            vocabulary=Vocabulary(size=size, eos=3),
            unit=unit,
            eos=eos,
            word_starts=words,
        )
        assert read_megatron(store.folder) == (expected, index)
        assert [store.tokens[a:b].tolist() for a, b in pairwise(store.offsets)] == expected
        assert store.documents.tolist() == index
        assert store.word_starts(0, store.facts.tokens).tolist() == expected_words
        start = store.facts.tokens // 3
        assert store.word_starts(start, store.facts.tokens).tolist() == expected_words[start:]
        assert verify(store.folder) == []


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    documents = [[np.arange(i, i + 5)] for i in range(50)]
    words = [[np.ones(5, bool)]] * 50
    return write_store(tmp_path / "store", documents, vocabulary=Vocabulary(size=100), word_starts=words)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.words"])
@pytest.mark.parametrize("damage", ["shorter", "longer", "gone"])
def test_a_damaged_file_is_refused_by_name(store: TokenStore, name: str, damage: str) -> None:
    file = store.folder / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-2] if damage == "shorter" else content + b"\0\0")
    with pytest.raises(UserError, match=name):
        TokenStore.open(store.folder)


def test_an_unfinished_or_missing_store_is_refused(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="terakoya prepare"):
        TokenStore.open(tmp_path / "nowhere")
    (store.folder / "store.json").unlink()
    with pytest.raises(UserError, match="no record of what they hold"):
        TokenStore.open(store.folder)
    (store.folder / ".parts").mkdir()
    with pytest.raises(UserError, match="not finished here: run the same command again"):
        TokenStore.open(store.folder)


def test_files_of_different_stores_are_refused(store: TokenStore, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", [[[1, 2]]], vocabulary=Vocabulary(size=100))
    shutil.copy(other.folder / "tokens.idx", store.folder / "tokens.idx")
    with pytest.raises(UserError, match=r"sequences: expected 50 as store\.json says, got 1"):
        TokenStore.open(store.folder)


def test_an_invalid_store_json_is_reported(store: TokenStore) -> None:
    for changes, message in (
        ({"tokens": "many"}, "tokens: "),
        ({"dtype": "uint56"}, "dtype: Input should be 'uint16' or 'int32'"),
        ({"version": 3}, "version: expected 2, got 3: of another terakoya; prepare the store again"),
    ):
        shutil.copytree(store.folder, store.folder.with_name(message[:5]))
        rewrite_store_json(store.folder.with_name(message[:5]), **changes)
        with pytest.raises(UserError, match=rf"store\.json: {message}"):
            TokenStore.open(store.folder.with_name(message[:5]))
    file = store.folder / "store.json"
    first = {**json.loads(file.read_text()), "version": 1}  # the first version carried no hash of itself
    del first["sha256"]
    file.write_text(json.dumps(first))
    with pytest.raises(UserError, match=r'store\.json: expected the SHA-256 of its content under "sha256", got none'):
        TokenStore.open(store.folder)


def test_an_index_of_another_format_is_reported(store: TokenStore) -> None:
    file = store.folder / "tokens.idx"
    content = file.read_bytes()
    file.write_bytes(b"TNTIDX\0\0\0" + content[9:])
    with pytest.raises(UserError, match="expected a Megatron index"):
        TokenStore.open(store.folder)
    file.write_bytes(content[:17] + b"\x09" + content[18:])
    with pytest.raises(UserError, match="got version 1, code 9"):
        TokenStore.open(store.folder)


def test_another_id_type_is_refused(store: TokenStore) -> None:
    file = store.folder / "tokens.idx"
    content = bytearray(file.read_bytes())
    content[17] = 3  # int16 is as large as uint16
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"tokens\.idx: dtype: expected uint16 as store\.json says, got int16"):
        TokenStore.open(store.folder)


@pytest.mark.parametrize("place", ["first", "last"])
def test_ids_beyond_the_vocabulary_are_refused_at_once(tmp_path: Path, place: str) -> None:
    ids = np.full(3_000_000, 7)
    folder = write_store(tmp_path / "s", [[ids]], vocabulary=Vocabulary(size=1000)).folder
    raw = np.memmap(folder / "tokens.bin", "<u2", "r+")
    at = 0 if place == "first" else len(raw) - 1
    raw[at] = 1000
    raw.flush()
    start = time.perf_counter()
    with pytest.raises(UserError, match=rf"tokens\.bin: token {at:,}: expected an id below 1,000.*got 1,000"):
        TokenStore.open(folder)
    assert time.perf_counter() - start < 1


def test_a_record_of_another_vocabulary_is_refused(store: TokenStore) -> None:
    rewrite_store_json(store.folder, vocabulary={"size": 50})
    with pytest.raises(UserError, match=r"token \d+: expected an id below 50, .* the store\.json of another store"):
        TokenStore.open(store.folder)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (34 + 4 * 50, r"expected sequences from byte 0 to 500, got 1 to 500"),
        (34 + 12 * 50 - 8, r"expected sequences from byte 0 to 500, got 0 to "),
        (34 + 12 * 50, r"expected documents from sequence 0 to 50, got 1 to 50"),
        (34 + 12 * 50 + 8 * 50, r"expected documents from sequence 0 to 50, got 0 to "),
    ],
)
def test_an_index_with_other_ends_is_refused(store: TokenStore, at: int, message: str) -> None:
    file = store.folder / "tokens.idx"
    content = bytearray(file.read_bytes())
    content[at] += 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        TokenStore.open(store.folder)


def test_verify_finds_changed_content(store: TokenStore) -> None:
    assert verify(store.folder) == []
    content = bytearray((store.folder / "tokens.bin").read_bytes())
    content[11] = 1  # the high byte of token 5
    (store.folder / "tokens.bin").write_bytes(content)
    faults = "\n".join(verify(store.folder))
    assert "tokens.bin: content changed" in faults
    assert f"token 5: expected an id below 100, got {256 + content[10]}" in faults


def test_verify_finds_an_inconsistent_index(store: TokenStore) -> None:
    file = store.folder / "tokens.idx"
    content = bytearray(file.read_bytes())
    content[34:38] = struct.pack("<i", 6)  # the first length
    file.write_bytes(content)
    faults = "\n".join(verify(store.folder))
    assert "lengths and byte pointers disagree" in faults
    assert "add up to 251 tokens, expected 250" in faults
    content[34:38] = struct.pack("<i", 5)
    content[-16:-8] = struct.pack("<q", 3)  # a document entry
    file.write_bytes(content)
    assert "document entries that rise from 0 to 50" in "\n".join(verify(store.folder))


def test_a_store_without_word_starts_is_reported(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", DOCUMENTS, vocabulary=Vocabulary(size=10))
    assert not (store.folder / "tokens.words").exists()
    with pytest.raises(UserError, match=r"without tokens\.words"):
        store.word_starts(0, 3)


def test_ids_outside_the_vocabulary_and_empty_stores_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected ids from 0 to 8"):
        write_store(tmp_path / "a", DOCUMENTS, vocabulary=Vocabulary(size=9))
    with pytest.raises(UserError, match="at least one token"):
        write_store(tmp_path / "b", [[[]]], vocabulary=Vocabulary(size=9))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="expected a new or empty folder"):
        write_store(tmp_path, DOCUMENTS, vocabulary=Vocabulary(size=10))


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    def fingerprint(name: str, documents: list[list[list[int]]], size: int = 10) -> str:
        return write_store(tmp_path / name, documents, vocabulary=Vocabulary(size=size)).fingerprint

    first = fingerprint("a", DOCUMENTS)
    assert fingerprint("b", DOCUMENTS) == first
    assert fingerprint("c", [[[7, 8], [8]], [[1, 2, 3, 4]]]) != first
    assert fingerprint("d", [[[7, 8]], [[9], [1, 2, 3, 4]]]) != first
    assert fingerprint("e", DOCUMENTS, size=11) != first


def test_a_store_is_picklable(store: TokenStore) -> None:
    again = pickle.loads(pickle.dumps(store))
    assert again.facts == store.facts
    assert np.array_equal(again.tokens, store.tokens)


def test_writing_a_store_releases_the_lock(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []

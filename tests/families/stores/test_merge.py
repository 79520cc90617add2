"""Merging gives the store of all corpora together; incompatible stores are refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_preparation import prepare_corpus
from small_store import damage
from word_tokenizer import WordTokenizer, make_folder

from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.store.token_store import TokenStore
from terakoya.store.writer import write_store
from terakoya_checks.verify_store import verify
from terakoya_stores.merge import merge

DATA = ("tokens.bin", "tokens.idx", "tokens.words")


def write_corpus(folder: Path, sizes: list[int]) -> list[Path]:
    """Writes files with these numbers of documents, each file with one bad line."""
    files = []
    for number, size in enumerate(sizes):
        rows = [json.dumps({"text": f"word{i * i} {number} abcdefg\nline{i} [MASK]"}) for i in range(size)]
        files.append(folder / f"{number}.jsonl")
        files[-1].write_text("\n".join([*rows, "{"]))
    return files


@pytest.mark.parametrize("options", [{}, {"unit": "line", "append_eos": True}])
def test_a_merged_store_is_the_store_of_all_corpora(tmp_path: Path, options: dict[str, Any]) -> None:
    tokenizer = make_folder(tmp_path / "tokenizer")

    def make(files: list[Path], out: Path) -> None:
        prepare_corpus(Corpus(files), WordTokenizer(), tokenizer, out, max_rejects=1.0, **options)

    files = write_corpus(tmp_path, [33, 1, 50])
    make(files, tmp_path / "whole")
    for number, file in enumerate(files):
        make([file], tmp_path / f"s{number}")
    facts = merge([tmp_path / f"s{number}" for number in range(3)], tmp_path / "merged")
    whole = TokenStore.open(tmp_path / "whole").facts
    for name in (*DATA, "rejects.jsonl", "tokenizer/size.txt"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert facts.fingerprint == whole.fingerprint and facts.literals == whole.literals == {"[MASK]": 84}
    assert facts.rejected_by_reason == whole.rejected_by_reason == {"bad JSON": 3}
    assert facts.options["merged"] == 3 and facts.options["unit"] == options.get("unit", "document")
    assert verify(tmp_path / "merged") == []


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stores=st.lists(
        st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=4), min_size=2, max_size=4
    ),
    chunk=st.integers(1, 16),
)
def test_bits_and_ids_join_at_any_length(
    tmp_path_factory: pytest.TempPathFactory, stores: list[list[list[int]]], chunk: int
) -> None:
    folder, vocabulary = tmp_path_factory.mktemp("m"), Vocabulary(size=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("terakoya_stores.merge._CHUNK", chunk)
        for number, lines in enumerate(stores):
            words = [[[token % 2 == 0 for token in line]] for line in lines]
            write_store(folder / str(number), [[line] for line in lines], vocabulary=vocabulary, word_starts=words)
        merge([folder / str(number) for number in range(len(stores))], folder / "all")
    store = TokenStore.open(folder / "all")
    assert store.tokens.tolist() == [token for lines in stores for line in lines for token in line]
    assert store.word_starts(0, store.facts.tokens).tolist() == (store.tokens % 2 == 0).tolist()
    assert np.diff(store.offsets).tolist() == [len(line) for lines in stores for line in lines]
    assert verify(store.folder) == []


BASE: dict[str, Any] = {"vocabulary": Vocabulary(size=100, eos=5), "unit": "document", "eos": None, "word_starts": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": Vocabulary(size=70_000, eos=5)}, "id type: expected uint16 as in .*first, got int32"),
        ({"vocabulary": Vocabulary(size=101, eos=5)}, "vocabulary size: expected 100 .*got 101"),
        ({"vocabulary": Vocabulary(size=100, eos=6)}, "vocabulary: expected .*eos=5.*got .*eos=6"),
        ({"unit": "line"}, "unit: expected document .*got line"),
        ({"eos": 5}, "end of document: expected None .*got 5"),
        ({"word_starts": [[[True, False]]]}, "word starts: expected not known .*got known; .*--no-word-starts"),
    ],
)
def test_incompatible_stores_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_store(tmp_path / "first", [[[1, 2]]], **BASE)
    write_store(tmp_path / "second", [[[1, 2]]], **{**BASE, **change})
    with pytest.raises(UserError, match=f"second: {message}"):
        merge([tmp_path / "first", tmp_path / "second"], tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "second"]


def test_word_starts_can_be_left_out(tmp_path: Path) -> None:
    write_store(tmp_path / "a", [[[1, 2]]], **BASE)
    write_store(tmp_path / "b", [[[3]]], **{**BASE, "word_starts": [[[True]]]})
    facts = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", word_starts=False)
    assert not facts.word_starts and not (tmp_path / "out" / "tokens.words").exists()


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    files = write_corpus(tmp_path, [2, 2])
    for number, file in enumerate(files):
        folder = make_folder(tmp_path / f"tokenizer{number}")
        (folder / "size.txt").write_text("1000" + " " * number)
        prepare_corpus(Corpus([file]), WordTokenizer(), folder, tmp_path / f"s{number}", max_rejects=1.0)
    with pytest.raises(UserError, match="s1: tokenizer vocabulary: expected 1000 as in"):
        merge([tmp_path / "s0", tmp_path / "s1"], tmp_path / "out")


def test_a_damaged_store_and_a_single_store_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_store(tmp_path / name, [[[1, 2]]], **BASE)
    with pytest.raises(UserError, match="two stores or more"):
        merge([tmp_path / "a"], tmp_path / "out")
    (tmp_path / "b" / "tokens.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"b/tokens\.bin: expected 4 bytes, got 3"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("damaged", ["a", "b"])
def test_a_changed_file_is_refused_and_leaves_nothing(tmp_path: Path, name: str, damaged: str) -> None:
    lines = [[list(range(40)), list(range(40, 80))] for _ in range(3)]
    words = [[[token % 2 == 0 for token in line] for line in document] for document in lines]
    for folder in "ab":
        write_store(tmp_path / folder, lines, vocabulary=Vocabulary(size=100), unit="line", word_starts=words)
    damage(tmp_path / damaged / name)
    with pytest.raises(UserError, match=rf"{damaged}/{name}: content changed .*expected SHA-256 \w+, got \w+"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_changed_or_missing_rejects_are_refused(tmp_path: Path, damage: str) -> None:
    tokenizer = make_folder(tmp_path / "tokenizer")
    for number, file in enumerate(write_corpus(tmp_path, [33, 34])):
        prepare_corpus(Corpus([file]), WordTokenizer(), tokenizer, tmp_path / f"s{number}", max_rejects=1.0)
    rejects = tmp_path / "s1" / "rejects.jsonl"
    if damage == "missing":
        rejects.unlink()
    else:
        rejects.write_bytes(rejects.read_bytes().replace(b"bad JSON", b"bad CSV "))
    with pytest.raises(
        UserError, match=rf"rejects\.jsonl: .*{'no such file' if damage == 'missing' else 'changed'}.*store verify"
    ):
        merge([tmp_path / "s0", tmp_path / "s1"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terakoya_stores.merge._CHUNK", 1 << 12)
    peaks = []
    for size in (500, 500, 5_000):  # the first size warms up
        documents = [[np.arange(100)]] * size
        words = [[np.ones(100, bool)]] * size
        folders = [tmp_path / f"{name}{size}.{len(peaks)}" for name in "ab"]
        for folder in folders:
            write_store(folder, documents, vocabulary=Vocabulary(size=100), word_starts=words)
        tracemalloc.start()
        merge(folders, tmp_path / f"out{size}.{len(peaks)}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[1], peaks

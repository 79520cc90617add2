"""fsspec reads addresses: the blocks equal those from disk, and errors name what is missing."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_preparation import prepare_corpus
from word_tokenizer import WordTokenizer, make_folder

from terakoya.corpus.corpus import Corpus, Document, Reject
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya_places.corpus_files import ObjectFile

TEXTS = [f"document {number} of many words" for number in range(200)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one jsonl and one parquet file."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:150]))
    pq.write_table(pa.table({"text": TEXTS[150:]}), folder / "b.parquet", row_group_size=10)
    return folder


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    """The address of the same files in fsspec's memory file system."""
    system = fsspec.filesystem("memory")
    for file in folder.iterdir():
        system.pipe(f"/corpus/{file.name}", file.read_bytes())
    yield "memory://corpus"
    system.rm("/corpus", recursive=True)


def read_all(corpus: Corpus) -> list[Document | Reject]:
    return [item for block in corpus.blocks(block_bytes=500) for item in corpus.read(block)]


def test_blocks_equal_those_from_disk(folder: Path, memory: str) -> None:
    here, there = Corpus([folder]), Corpus(find_files([memory]))
    assert [str(file) for file in there.sources] == ["memory:///corpus/a.jsonl", "memory:///corpus/b.parquet"]
    assert [(item.text, item.line) for item in read_all(there)] == [(item.text, item.line) for item in read_all(here)]  # type: ignore[union-attr]
    cuts = [
        [
            (block.file.name, block.start, block.stop, block.line, block.disk_bytes)
            for block in corpus.blocks(block_bytes=500)
        ]
        for corpus in (here, there)
    ]
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) > 10
    assert there.fingerprint == here.fingerprint
    assert there.total_bytes == here.total_bytes
    assert pickle.loads(pickle.dumps(there)).sources == there.sources


def test_addresses_with_slashes_folded_by_a_path_are_understood(memory: str) -> None:
    files = find_files([Path(memory) / "a.jsonl", Path(memory) / "*.parquet", f"{memory}/b.parquet"])
    assert [file.name for file in files] == ["a.jsonl", "b.parquet", "b.parquet"]
    assert all(isinstance(file, ObjectFile) for file in files)


def test_hidden_files_and_folders_are_left_out(memory: str) -> None:
    system = fsspec.filesystem("memory")
    for name in (".cache/c.jsonl", ".d.jsonl"):
        system.pipe(f"/corpus/{name}", b"")
    assert [file.name for file in find_files([memory])] == ["a.jsonl", "b.parquet"]
    assert [file.name for file in find_files([f"{memory}/**/*.jsonl"])] == ["a.jsonl"]
    assert [file.name for file in find_files([f"{memory}/.cache", f"{memory}/.d.jsonl"])] == ["c.jsonl", ".d.jsonl"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_store_from_an_address_equals_that_from_disk(folder: Path, tmp_path: Path, processes: int) -> None:
    tokenizer = make_folder(tmp_path / "tokenizer")
    for name, source in (("here", folder), ("there", f"file://{folder}")):
        prepare_corpus(Corpus(find_files([source])), WordTokenizer(), tokenizer, tmp_path / name, processes=processes)
    for name in ("tokens.bin", "tokens.idx", "tokens.words"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_the_content_hash_of_an_object_store_is_the_fingerprint(memory: str) -> None:
    names = [f"{memory}/a.jsonl"]
    one, other = (Corpus([ObjectFile(name, version) for name in names]) for version in ("etag 1", "etag 2"))
    assert one.fingerprint != other.fingerprint
    assert Corpus([ObjectFile(names[0], "etag 1")]).fingerprint == one.fingerprint


def test_a_changed_file_is_detected(memory: str) -> None:
    (file,) = find_files([f"{memory}/a.jsonl"])
    before = file.stat().st_mtime_ns
    fsspec.filesystem("memory").pipe("/corpus/a.jsonl", b'{"text": "other"}\n')
    assert file.stat().st_mtime_ns != before


def test_missing_files_are_named(memory: str) -> None:
    with pytest.raises(UserError, match=r"memory://corpus/c\.jsonl: no such file"):
        find_files([f"{memory}/c.jsonl"])
    with pytest.raises(UserError, match=r"memory://corpus/\*\.csv: expected files ending in"):
        find_files([f"{memory}/*.csv"])
    with pytest.raises(UserError, match=r"nowhere://a/b\.txt: expected an address such as s3://"):
        find_files(["nowhere://a/b.txt"])


@pytest.mark.parametrize(
    "address", [f"hf://datasets/org/{rest}/a.parquet" for rest in ("set", "set/data@1", "set@main")]
)
def test_a_data_set_of_the_hub_needs_a_revision(address: str) -> None:
    with pytest.raises(UserError, match=r"expected a revision, .* the data can change between two runs"):
        find_files([address])


def test_an_unreachable_store_is_a_user_error(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = find_files([f"{memory}/a.jsonl"])

    def fails(*_: object, **__: object) -> None:
        raise PermissionError("no credentials")

    for name in ("info", "open"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), name, fails)
    for ask in (file.open, file.stat, lambda: find_files([f"{memory}/a.jsonl"])):
        with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(no credentials\); check .*credentials"):
            ask()


def test_without_its_library_an_address_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = importlib.import_module("fsspec.registry")._registry
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for name in {"s3", "s3a"} & opened.keys():  # by another test
        monkeypatch.delitem(opened, name)
    with pytest.raises(UserError, match=r's3://bucket/a\.txt: .*pip install "terakoya\[places\]"'):
        find_files(["s3://bucket/a.txt"])

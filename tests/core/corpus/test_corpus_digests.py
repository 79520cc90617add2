"""Hashing a corpus in the pass that reads it: the fingerprint is the same, and changes during the pass are detected."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terakoya.corpus import corpus as corpus_module
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import Source, content_hash
from terakoya.errors import UserError
from terakoya.tokenization.train import make_tokenizer
from terakoya.toolkit.tokenizers.word_counts_file import read_counts
from terakoya_corpus.count_words import save_word_counts

TEXTS = [f"文書{n}は橋の話。" * (n % 7 + 1) for n in range(3000)]
SETTINGS = {"type": "byte_bpe", "vocab_size": 300}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file of every format."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines) + gzip.compress(lines))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(lines, preset=0))
    (folder / "d.jsonl.bz2").write_bytes(bz2.compress(lines))
    with pa.CompressedOutputStream(str(folder / "e.jsonl.zst"), "zstd") as stream:
        stream.write(lines)
    (folder / "f.txt").write_text("\n\n".join(TEXTS))
    with (folder / "g.csv").open("w", newline="") as table:
        csv.writer(table).writerows([["text"], *([text] for text in TEXTS)])
    pq.write_table(pa.table({"text": TEXTS}), folder / "h.parquet")
    (folder / "i.jsonl").write_bytes(b"")
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were read only for their hash."""
    names: list[str] = []

    def recording(file: Source) -> str:
        names.append(file.name)
        return content_hash(file)

    monkeypatch.setattr(corpus_module, "content_hash", recording)
    return names


@pytest.mark.parametrize("block_bytes", [1000, 1 << 22])
def test_the_fingerprint_is_the_same_and_text_is_read_once(folder: Path, hashed: list[str], block_bytes: int) -> None:
    plain, passing = Corpus([folder]), Corpus([folder], digests={})
    blocks = list(passing.blocks(block_bytes=block_bytes))
    assert blocks == list(plain.blocks(block_bytes=block_bytes))
    assert passing.fingerprint == plain.fingerprint
    assert sorted(hashed) == sorted([*(file.name for file in folder.iterdir()), "h.parquet"])


def test_remote_files_too(folder: Path, hashed: list[str]) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/digests/b.jsonl.gz", (folder / "b.jsonl.gz").read_bytes())
    corpus = Corpus(["memory://digests/b.jsonl.gz"], digests={})
    list(corpus.blocks())
    assert corpus.fingerprint == Corpus([folder / "b.jsonl.gz"]).fingerprint
    assert hashed == ["b.jsonl.gz"]


def test_half_a_pass_stores_no_hash(folder: Path) -> None:
    corpus = Corpus([folder / "b.jsonl.gz"], digests={})
    next(corpus.blocks(block_bytes=1000))
    assert corpus.digests == {}


def test_a_file_that_changed_is_refused(folder: Path) -> None:
    corpus = Corpus([folder / "a.jsonl"], digests={})
    list(corpus.blocks())
    (folder / "a.jsonl").write_bytes((folder / "a.jsonl").read_bytes().replace(b"1", b"2"))
    with pytest.raises(UserError, match=r"a\.jsonl: was changed while it was read"):
        list(corpus.blocks())


def test_a_counted_table_is_found_again(folder: Path, tmp_path: Path, hashed: list[str]) -> None:
    sources = [folder / "a.jsonl", folder / "b.jsonl.gz"]
    save_word_counts(sources, tmp_path / "table", settings=SETTINGS, processes=1)
    assert hashed == []
    tokenizer: Any = make_tokenizer(SETTINGS)
    assert read_counts(tmp_path / "table", Corpus(sources), tokenizer.splitting()).documents == 3 * len(TEXTS)


def test_no_table_is_written_for_a_file_that_changes_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from terakoya.toolkit.tokenizers import word_counts_file as counts_file

    real: Callable[..., Any] = counts_file.load_or_count_words

    def changing(*arguments: Any, **options: Any) -> Any:
        table = real(*arguments, **options)
        with (folder / "a.jsonl").open("ab") as stream:
            stream.write(b'{"text": "more"}\n')
        return table

    monkeypatch.setattr(counts_file, "load_or_count_words", changing)
    with pytest.raises(UserError, match="a file was changed while it was read"):
        save_word_counts([folder / "a.jsonl"], tmp_path / "table", settings=SETTINGS, processes=1)
    assert not (tmp_path / "table").exists()

"""Every document is read once, in order, for any format and block size; everything else is rejected with its line."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import real_data

from terakoya.corpus.corpus import Corpus, Document, Reject
from terakoya.errors import UserError


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def read_all(corpus: Corpus, *, block_bytes: int = 1 << 20) -> list[Document | Reject]:
    return [item for block in corpus.blocks(block_bytes=block_bytes) for item in corpus.read(block)]


def texts(items: list[Document | Reject]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


@settings(max_examples=40)
@given(
    documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=30),
    block_bytes=st.integers(1, 400),
    packed=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    final_newline=st.booleans(),
    bom=st.booleans(),
    escape=st.booleans(),
)
def test_every_text_of_jsonl_is_read(
    documents: list[str], block_bytes: int, packed: bool, newline: str, final_newline: bool, bom: bool, escape: bool
) -> None:
    content = newline.join(json.dumps({"text": d, "n": 1}, ensure_ascii=escape) for d in documents)
    content += newline if final_newline and documents else ""
    with tempfile.TemporaryDirectory() as folder:
        raw = (b"\xef\xbb\xbf" if bom else b"") + content.encode()
        file = write(Path(folder) / ("a.jsonl.gz" if packed else "a.jsonl"), raw)
        items = read_all(Corpus([file]), block_bytes=block_bytes)
    real = [(number, d) for number, d in enumerate(documents, 1) if d and not d.isspace()]
    assert [(i.line, i.text) for i in items if isinstance(i, Document)] == real
    rejects = [(i.line, i.reason) for i in items if isinstance(i, Reject)]
    assert rejects == [(n, "empty document") for n, d in enumerate(documents, 1) if not d or d.isspace()]


LINE = st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=30)
BLANKS = st.lists(st.sampled_from(["", " ", "\t", "\u3000"]), min_size=1, max_size=3)


@settings(max_examples=40)
@given(
    documents=st.lists(st.tuples(st.lists(LINE, min_size=1, max_size=5), BLANKS), max_size=12),
    block_bytes=st.integers(1, 200),
    packed=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    final_newline=st.booleans(),
)
def test_txt_is_split_at_blank_lines_or_at_every_line(
    documents: list[tuple[list[str], list[str]]], block_bytes: int, packed: bool, newline: str, final_newline: bool
) -> None:
    lines: list[str] = []
    starts: list[int] = []
    for paragraph, blanks in documents:
        starts.append(len(lines) + 1)
        lines += paragraph + blanks
    if not final_newline and lines:
        lines = lines[: -len(documents[-1][1])]
    content = newline.join(lines) + (newline if final_newline else "")
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / ("a.txt.gz" if packed else "a.txt"), content.encode())
        by_blank = read_all(Corpus([file]), block_bytes=block_bytes)
        by_line = read_all(Corpus([file], documents="line"), block_bytes=block_bytes)
    assert texts(by_blank) == ["\n".join(paragraph) for paragraph, _ in documents]
    assert [item.line for item in by_blank] == starts
    assert texts(by_line) == [line for paragraph, _ in documents for line in paragraph]
    assert [lines[item.line - 1] for item in by_line] == texts(by_line)


def test_each_error_is_reported_with_its_line(tmp_path: Path) -> None:
    rows = [
        b'{"text": "good"}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "no end',
        b'{"title": "no text"}',
        b'{"text": 5}',
        b'{"text": " \\n\\u3000"}',
        b'["text"]',
        b"",
        b'{"text": "\\ud800"}',
        b'{"text": "' + b"x" * 200 + b'"}',
        b'{"text": "nul \\u0000 kept"}',
        b'{"text": "half \\uD83D of one"}',
        b'{"text": "neither JSON \\ud83d"',
    ]
    file = write(tmp_path / "a.jsonl", b"\n".join(rows))
    items = read_all(Corpus([file], max_document_bytes=100), block_bytes=7)
    assert texts(items) == ["good", "nul \0 kept"]
    rejects = [(item.line, item.reason) for item in items if isinstance(item, Reject)]
    assert rejects == [
        (2, "bad encoding"),
        (3, "bad JSON"),
        (4, "missing field"),
        (5, "field is not a string"),
        (6, "empty document"),
        (7, "not a JSON object"),
        (9, "lone surrogate"),
        (10, "document too large"),
        (12, "lone surrogate"),
        (13, "bad JSON"),
    ]
    excerpts = [item.excerpt for item in items if isinstance(item, Reject)]
    assert excerpts[0] == '{"text": "bad \\xff byte"}'
    assert excerpts[-3].startswith('{"text": "xxx') and len(excerpts[-3]) == 80


def test_bad_bytes_affect_only_their_own_document_in_txt(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "一つ目\n\n".encode() + b"\xe3\x81 broken\n\n" + "三つ目 \0\n".encode())
    items = read_all(Corpus([file]))
    assert texts(items) == ["一つ目", "三つ目 \0"]
    assert [(i.line, i.reason) for i in items if isinstance(i, Reject)] == [(3, "bad encoding")]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("documents", ["blank", "line"])
def test_the_size_limit_is_exact(tmp_path: Path, name: str, newline: bytes, documents: str) -> None:
    # In paragraphs the line endings count; there are two of them.
    fits = b"a" * (100 - (2 * len(newline) + 1 if documents == "blank" else 0))
    second = newline + b"a" if documents == "blank" else b""
    content = b""
    for line in (fits + second, fits + b"a" + second, fits + second):
        content += line + newline + newline
    file = write(tmp_path / name, content)
    for block_bytes in (1, 5, 150, 1000):
        corpus = Corpus([file], documents=documents, max_document_bytes=100)  # type: ignore[arg-type]
        items = read_all(corpus, block_bytes=block_bytes)
        kinds = [item.reason if isinstance(item, Reject) else "" for item in items]
        assert kinds == ["", "document too large", ""], block_bytes


def test_blocks_are_disjoint_cover_the_file_and_are_picklable(tmp_path: Path) -> None:
    lines = [orjson.dumps({"text": f"document {n} " + "語" * (n % 50)}) for n in range(500)]
    plain = write(tmp_path / "a.jsonl", b"\n".join(lines))
    packed = write(tmp_path / "b.jsonl.gz", b"\n".join(lines))
    corpus = Corpus([plain, packed])
    blocks = list(corpus.blocks(block_bytes=1000))
    assert blocks == list(pickle.loads(pickle.dumps(corpus)).blocks(block_bytes=1000))
    for file in (plain, packed):
        own = [block for block in blocks if block.file == file]
        assert len(own) > 20
        assert [block.start for block in own] == [0, *(block.stop for block in own[:-1])]
        assert own[-1].stop == plain.stat().st_size
    assert all(block.data is None for block in blocks if block.file == plain)
    assert sum(block.disk_bytes for block in blocks) == corpus.total_bytes
    scattered = [pickle.loads(pickle.dumps(block)) for block in reversed(blocks)]
    again = [item for block in reversed(scattered) for item in corpus.read(block)]
    assert texts(again) == [orjson.loads(line)["text"] for line in lines] * 2


def test_the_fingerprint_depends_on_content_and_names_not_on_folders(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    first = write(tmp_path / "a.txt", b"one\n")
    moved = write(tmp_path / "there" / "a.txt", b"one\n")
    other = write(tmp_path / "b.txt", b"two\n")
    fingerprint = Corpus([first, other]).fingerprint
    assert fingerprint == Corpus([moved, other]).fingerprint
    assert fingerprint != Corpus([other, first]).fingerprint
    other.write_bytes(b"twO\n")
    assert fingerprint != Corpus([first, other]).fingerprint


def test_unusable_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Corpus([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match=r"ending in \.jsonl, \.txt"):
        Corpus([write(tmp_path / "a.docx", b"")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="found none"):
        Corpus([tmp_path / "empty"])
    with pytest.raises(UserError, match="at least one file"):
        Corpus([])


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / os.fsdecode(b"a\xff.txt"), b"text")
    with pytest.raises(UserError, match=r"a\\udcff\.txt': expected a name in UTF-8") as refused:
        Corpus([tmp_path])
    str(refused.value).encode()


@pytest.mark.real_data
def test_real_text_is_read_completely() -> None:
    file = real_data("aozora-small.jsonl.gz")
    with gzip.open(file) as stream:
        expected = [orjson.loads(line)["text"] for line in stream]
    assert texts(read_all(Corpus([file]), block_bytes=1 << 18)) == expected

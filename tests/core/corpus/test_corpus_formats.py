"""Every format and compression gives the same documents; damaged files are reported."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import at_night

from terakoya.corpus.corpus import Corpus, Document, Reject
from terakoya.corpus.parquet import first_rows
from terakoya.errors import UserError
from terakoya_pipeline.hold_out import hold_out

PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
LINES = ["いろはにほへと", 'a "quoted" word', "one, two", "改行\nのある文", "tab", "x" * 300, "終わり"]


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(PACKERS.get(file.suffix, bytes)(content))
    return file


def write_csv(rows: Sequence[Sequence[str]], newline: str = "\r\n") -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator=newline).writerows(rows)
    return out.getvalue().encode()


def read_all(corpus: Corpus, *, block_bytes: int = 1 << 20) -> list[Document | Reject]:
    return [item for block in corpus.blocks(block_bytes=block_bytes) for item in corpus.read(block)]


def texts(items: list[Document | Reject]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


def rejects(items: list[Document | Reject]) -> list[tuple[int, str]]:
    return [(item.line, item.reason) for item in items if isinstance(item, Reject)]


@pytest.mark.parametrize("block_bytes", [1, 60, 10_000])
@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("kind", ["jsonl", "txt", "csv", "tsv"])
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str, suffix: str, block_bytes: int) -> None:
    expected = [line for line in LINES if kind in ("jsonl", "csv") or "\n" not in line] * 5
    if kind == "jsonl":
        content = "\n".join(json.dumps({"text": line}) for line in expected).encode()
    elif kind == "csv":
        content = write_csv([["id", "text"], *(["1", line] for line in expected)])
    elif kind == "tsv":
        content = "\n".join(["text\tid", *(f"{line}\t1" for line in expected)]).encode()
    else:
        content = "\n\n".join(expected).encode()
    corpus = Corpus([write(tmp_path / f"a.{kind}{suffix}", content)])
    blocks = list(corpus.blocks(block_bytes=block_bytes))
    items = [item for block in reversed(blocks) for item in list(corpus.read(block))[::-1]][::-1]
    assert texts(items) == expected
    assert len(items) == len(expected)
    assert all((block.data is None) == (suffix == "") for block in blocks)
    assert len(blocks) > 1 or block_bytes == 10_000
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]


CELL = st.text(st.sampled_from('ab"\n,あ '), max_size=8)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(CELL, CELL), max_size=12),
    block_bytes=st.integers(1, 60),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_csv_is_read_as_the_csv_module_writes_it(rows: list[tuple[str, str]], block_bytes: int, newline: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "a.csv", b"\xef\xbb\xbf" + write_csv([("text", "other"), *rows], newline))
        items = read_all(Corpus([file]), block_bytes=block_bytes)
    assert texts(items) == [text for text, _ in rows if text.strip()]


def test_errors_in_csv_are_reported_with_their_line(tmp_path: Path) -> None:
    content = (
        b'text,n\ngood,1\nbad \xff,1\nno second\nun,quoted,comma\n"a"b,1\n,1\n' + b"x" * 200 + b',1\n"two\nlines",1\n'
    )
    for suffix in ("", ".gz"):
        items = read_all(Corpus([write(tmp_path / f"a.csv{suffix}", content)], max_document_bytes=100), block_bytes=20)
        assert texts(items) == ["good", "two\nlines"]
        assert rejects(items) == [
            (3, "bad encoding"),
            (4, "wrong number of columns"),
            (5, "wrong number of columns"),
            (6, "bad CSV"),
            (7, "empty document"),
            (8, "document too large"),
        ]
        assert items[-1].line == 9


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_an_unclosed_quote_is_an_error(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a.csv{suffix}", b'text\ngood\n"bad\n' + b"more\n" * 1000)
    with pytest.raises(UserError, match=r"a\.csv.*line \d: expected a closing quote"):
        read_all(Corpus([file], max_document_bytes=100), block_bytes=4)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.bz2", "a.parquet"])
def test_a_missing_column_is_an_error_that_names_similar_ones(tmp_path: Path, name: str) -> None:
    if name == "a.parquet":
        pq.write_table(pa.table({"id": [1], "test": ["a"]}), tmp_path / name)
    else:
        write(tmp_path / name, b"test\na\n")
    with pytest.raises(UserError, match=rf'{name}: expected (one|a) column (named )?"text", got none.*"test".*--field'):
        read_all(Corpus([tmp_path / name]))
    assert texts(read_all(Corpus([tmp_path / name], field="test"))) == ["a"]


# -------------------------------------------------------------------------------------------------------- parquet


@settings(max_examples=40)
@given(
    documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(str.strip)),
    row_group=st.integers(1, 20),
    block_bytes=st.integers(1, 600),
    kind=st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]),
)
def test_every_row_of_parquet_is_read(
    documents: list[str], row_group: int, block_bytes: int, kind: pa.DataType
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.parquet"
        table = pa.table({"n": range(len(documents)), "text": pa.array(documents).cast(kind)})
        pq.write_table(table, file, row_group_size=row_group)
        corpus = Corpus([file])
        blocks = list(corpus.blocks(block_bytes=block_bytes))
        items = [item for block in blocks for item in corpus.read(block)]
        assert sum(block.disk_bytes for block in blocks) in (0, corpus.total_bytes)
    assert [(item.line, item.text) for item in items if isinstance(item, Document)] == list(enumerate(documents, 1))
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])][: len(blocks)]


def test_a_long_text_that_a_short_file_holds_many_times_is_read_row_by_row(tmp_path: Path) -> None:
    """Three thousand times 900 kB would be 2.7 GB, more than an array of strings holds."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 1500, pa.int32()), pa.array(["あ" * 300_000, "short"]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="zstd", row_group_size=3000)
    items = read_all(Corpus([tmp_path / "a.parquet"], max_document_bytes=1000))
    assert len(items) == 3000 and {each.reason for each in items if isinstance(each, Reject)} == {"document too large"}
    assert [each.text for each in items if isinstance(each, Document)] == ["short"] * 1500


def test_errors_in_parquet_are_reported_with_their_row(tmp_path: Path) -> None:
    raw = pa.array([b"good", None, b"\xff", b" ", b"x" * 101, "良い".encode()], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", row_group_size=2)
    items = read_all(Corpus([tmp_path / "a.parquet"], max_document_bytes=100))
    assert texts(items) == ["good", "良い"]
    assert rejects(items) == [
        (2, "empty document"),
        (3, "bad encoding"),
        (4, "empty document"),
        (5, "document too large"),
    ]


def test_a_large_row_group_is_shared_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    documents = [f"{number} " + "語" * 300 for number in range(40_000)]
    pq.write_table(pa.table({"text": documents}), file, compression="zstd", use_dictionary=False)
    corpus = Corpus([file])
    blocks = list(corpus.blocks(block_bytes=4 << 20))
    assert len(blocks) >= 8
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    at = peak = 0
    for block in blocks:
        for item in corpus.read(block):
            assert isinstance(item, Document)
            assert item.text == documents[at]
            at += 1
            peak = max(peak, pa.total_allocated_bytes() - before)
    assert tracemalloc.get_traced_memory()[1] < 25_000_000
    tracemalloc.stop()
    assert at == len(documents)
    assert peak < 20_000_000  # the row group has 36 MB


def test_a_broken_parquet_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a" * 50] * 1000}), file, compression="snappy", use_dictionary=False)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(UserError, match=r"a\.parquet: expected a whole parquet file"):
        read_all(Corpus([file]))
    file.write_bytes(whole[:20] + b"\xff" * 200 + whole[220:])
    with pytest.raises(UserError, match=r"a\.parquet: expected a whole parquet file"):
        read_all(Corpus([file]))
    pq.write_table(pa.table({"text": [1, 2]}), file)
    with pytest.raises(UserError, match='column "text": expected strings, got int64'):
        read_all(Corpus([file]))
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), file)
    with pytest.raises(UserError, match=r'a\.parquet: expected one column "text", got 2; rename them'):
        read_all(Corpus([file]))


def test_a_parquet_file_of_nulls_alone_is_a_shard_without_a_document(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["一", "二"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.nulls(2), "id": [1, 2]}), tmp_path / "b.parquet")
    items = read_all(Corpus([tmp_path]))
    assert texts(items) == ["一", "二"]
    assert rejects(items) == [(1, "empty document"), (2, "empty document")]


# ---------------------------------------------------------------------------------------------------- compression


def test_a_blank_cell_is_an_empty_document_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\n一,1\n,2\n　,3\n", encoding="utf-8")
    (tmp_path / "a.tsv").write_text("text\tid\n一\t1\n\t2\n　\t3\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "一"}\n{"text": null}\n{"text": "　"}\n', encoding="utf-8")
    pq.write_table(pa.table({"text": ["一", None, "　"]}), tmp_path / "a.parquet")
    for file in sorted(tmp_path.iterdir()):
        items = read_all(Corpus([file]))
        assert texts(items) == ["一"] and [reason for _, reason in rejects(items)] == ["empty document"] * 2, file


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())]
)
def test_text_that_parquet_calls_binary_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    """Older Spark, Impala and Hive write strings without their mark."""
    values = pa.array(["東京の空。".encode(), None, "犬".encode()], pa.binary()).cast(kind)
    pq.write_table(pa.table({"text": values, "picture": [b"\x89PNG\xff" * 99] * 3}), tmp_path / "a.parquet")
    assert texts(read_all(Corpus([tmp_path / "a.parquet"]))) == ["東京の空。", "犬"]
    assert first_rows(tmp_path / "a.parquet", 3) == [{"text": "東京の空。"}, {}, {"text": "犬"}]


def test_a_zst_file_with_a_long_window_is_not_called_damaged(tmp_path: Path) -> None:
    """The first bytes of what `zstd --long=31` writes: the window of 2 GiB is in its header."""
    (tmp_path / "a.txt.zst").write_bytes(bytes.fromhex("28b52ffd04a8110000610a55c8cc1e"))
    with pytest.raises(UserError, match=r"a\.txt\.zst: was compressed with a long window .*zstd -dc --long=31"):
        read_all(Corpus([tmp_path / "a.txt.zst"]))


@pytest.mark.parametrize("suffix", [suffix for suffix in PACKERS if suffix])
def test_damaged_compressed_files_are_reported(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a.txt{suffix}", b"".join(b"some text %d\n" % n for n in range(10_000)))
    whole = file.read_bytes()
    for content in (whole[:-5], whole[: len(whole) // 2], b"plain text, not packed"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"a\.txt\{suffix}: expected a whole \w+ file, got a damaged or truncated"):
            read_all(Corpus([file]))


class BrokenDisk(io.FileIO):
    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.txt.xz", "a.txt.bz2", "a.parquet"])
def test_what_the_system_cannot_read_is_not_called_damaged(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus([write(tmp_path / name, b"text" * 9)])
    with monkeypatch.context() as patch, pytest.raises(OSError, match=rf"Input/output error: '.*{name}'") as raised:
        patch.setattr(Path, "open", lambda path, _: io.BufferedReader(BrokenDisk(path)))
        read_all(corpus)
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize(
    "name", at_night(["a.jsonl", "a.jsonl.gz", *(f"a.txt{suffix}" for suffix in PACKERS)], always=["a.jsonl.gz"])
)
def test_a_huge_document_is_never_in_memory(tmp_path: Path, name: str) -> None:
    content = b"before\n\n" + b"\n".join([b"x" * 1000] * 20_000) + b"\n\nafter\n"
    if name.startswith("a.jsonl"):
        content = b'{"text": "before"}\n\n{"text": "' + b"x" * 20_000_000 + b'"}\n{"text": "after"}\n'
    file = write(tmp_path / name, content)
    del content
    corpus = Corpus([file], max_document_bytes=1_000_000)
    tracemalloc.start()
    items = read_all(corpus, block_bytes=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts(items) == ["before", "after"]
    assert rejects(items) == [(3, "document too large")]
    assert peak < 16_000_000  # 8 MiB of it are xz's own window


@pytest.mark.parametrize("suffix", [suffix for suffix in PACKERS if suffix])
def test_concatenated_compressed_parts_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"one\n\nt") + pack(b"wo\n"))
    assert texts(read_all(Corpus([tmp_path / f"a.txt{suffix}"]))) == ["one", "two"]


def test_patterns_and_folders_mean_their_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    first, second = write(tmp_path / "a.txt.zst", b"one"), write(tmp_path / "b.txt.xz", b"two")
    third = tmp_path / "sub" / "c.parquet"
    pq.write_table(pa.table({"text": ["three"]}), third)
    (tmp_path / "sub" / "notes.md").write_text("no corpus")
    assert Corpus([tmp_path]).sources == (first, second, third)
    assert Corpus([tmp_path / "*.txt.*"]).sources == (first, second)
    assert Corpus([tmp_path / "**" / "*.parquet"]).sources == (third,)
    assert texts(read_all(Corpus([tmp_path]))) == ["one", "two", "three"]
    with pytest.raises(UserError, match="no file matches"):
        Corpus([tmp_path / "*.jsonl"])
    with pytest.raises(UserError, match="expected a file name ending in"):
        Corpus([third.rename(tmp_path / "c.parquet.gz")])


def test_links_in_a_folder_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for folder in (corpus / "books", elsewhere / "wiki"):
        folder.mkdir(parents=True)
    own, book = write(corpus / "own.txt", b"own"), write(corpus / "books" / "b.txt", b"book")
    write(elsewhere / "wiki" / "w.txt", b"wiki")
    (corpus / "wiki").symlink_to(elsewhere, target_is_directory=True)
    (corpus / "all").symlink_to(corpus, target_is_directory=True)  # a circle
    (corpus / "a").symlink_to(corpus / "books", target_is_directory=True)  # read under its own path
    (elsewhere / "up").symlink_to(tmp_path, target_is_directory=True)
    assert Corpus([corpus]).sources == (book, own, corpus / "wiki" / "wiki" / "w.txt")
    (corpus / "gone").symlink_to(tmp_path / "disk", target_is_directory=True)
    with pytest.raises(UserError, match=r"gone: is a link to .*disk, which does not exist"):
        Corpus([corpus])


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    kept = write(tmp_path / "a.txt", b"one")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in (".ipynb_checkpoints/a-checkpoint.txt", ".b.txt"):
        write(tmp_path / name, b"an old one")
    assert Corpus([tmp_path]).sources == (kept,)
    assert len(Corpus([tmp_path / ".ipynb_checkpoints", tmp_path / ".b.txt"]).sources) == 2  # named by the user


def test_a_pattern_takes_each_file_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "text" / "a" / "b").mkdir(parents=True)
    names = ("text/a/b/c.txt", "text/a/d.txt", "text/x.txt")
    files = tuple(write(tmp_path / name, name.encode()) for name in names)
    for pattern in ("text", "text/*", "text/**", "text/**/*", "text/**/*.txt"):
        assert Corpus([tmp_path / pattern]).sources == files, pattern
    assert "given more than once" not in caplog.text
    given = [tmp_path / "text" / "x.txt", tmp_path / "text" / "a" / ".." / "x.txt"]
    assert len(Corpus(given).sources) == 2
    assert (
        f"files are given more than once, and so are their documents: 1 of them, such as {files[2]} (2 times)"
        in caplog.text
    )


SPACES = [character for code in range(0x10000) if (character := chr(code)).isspace() and character != "\n"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_of_any_white_space_are_blank(tmp_path: Path, name: str) -> None:
    assert {"\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\v", "\f"} <= set(SPACES)
    lines = [
        line for number, space in enumerate([*SPACES, "".join(SPACES)]) for line in (f"文書 {number}\u200b", space)
    ]
    file = write(tmp_path / name, "\n".join(lines).encode())
    for documents in ("blank", "line"):
        items = read_all(Corpus([file], documents=documents), block_bytes=7)  # type: ignore[arg-type]
        assert texts(items) == lines[::2] and len(items) == len(texts(items))


def test_only_at_its_start_does_a_csv_file_have_a_byte_order_mark(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    file = write(tmp_path / "a.csv", b"text\nfirst\n" + mark + b'"a\nb"\nlast\n')
    whole = read_all(Corpus([file]), block_bytes=1000)
    assert texts(whole)[-1] == "last" and len(whole) > 2
    assert [read_all(Corpus([file]), block_bytes=size) for size in range(1, 30)] == [whole] * 29


def test_the_last_documents_of_a_zst_file_are_held_out_but_not_of_parquet(tmp_path: Path) -> None:
    corpus = Corpus([write(tmp_path / "a.txt.zst", b"one\n\ntwo\n\nthree\n")])
    kept, held = hold_out(corpus, 1, tmp_path / "split")
    assert texts(read_all(Corpus(kept))) == ["one", "two"]
    assert texts(read_all(Corpus([held]))) == ["three"]
    pq.write_table(pa.table({"text": ["three"]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match="hold_out: expected the corpus to end with a jsonl or txt file"):
        hold_out(Corpus([tmp_path / "c.parquet"]), 1, tmp_path / "split")


def test_several_keys_serve_several_formats(tmp_path: Path) -> None:
    lines = [{"text": "一"}, {"body": "二", "text": "三"}, {"body": "四"}, {"content": "五"}]
    mixed = write(tmp_path / "a.jsonl.gz", "".join(json.dumps(each) + "\n" for each in lines).encode())
    table = tmp_path / "b.parquet"
    pq.write_table(pa.table({"id": [1, 2], "body": ["六", "七"]}), table)
    rows = write(tmp_path / "c.csv", write_csv([["text", "body"], ["八", "not this"]]))
    plain = write(tmp_path / "d.txt", "九\n".encode())
    items = read_all(Corpus([mixed, table, rows, plain], field="text, body"))
    assert texts(items) == ["一", "三", "四", "六", "七", "八", "九"]
    assert rejects(items) == [(4, "missing field")]


def test_a_column_whose_name_has_a_comma_is_that_column(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", write_csv([["text,body", "body"], ["一", "二"]]))
    assert texts(read_all(Corpus([file], field="text,body"))) == ["一"]
    with pytest.raises(UserError, match='expected a column "main,title", got none'):
        read_all(Corpus([file], field="main,title"))

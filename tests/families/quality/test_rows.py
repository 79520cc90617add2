"""Files of examples are read by their endings; what is wrong in one is said with its place."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from terakoya.errors import UserError
from terakoya_quality.finetuning.rows import read_rows


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"text": "x", "label": "1"}\n\n{"text": "y\\"z", "label": "0"}\n'),
        ("a.json", '{"text": "x", "label": "1"}\n{"text": "y\\"z", "label": "0"}'),
        ("a.json", '[\n {"text": "x", "label": "1"},\n {"text": "y\\"z", "label": "0"}\n]'),
        ("a.csv", '\ufefftext,label\nx,1\n"y""z",0\n'),
        ("a.tsv", 'text\tlabel\nx\t1\ny"z\t0\n'),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_all_forms_give_the_same_rows(tmp_path: Path, name: str, text: str, compressed: bool) -> None:
    file = tmp_path / (name + ".gz" * compressed)
    file.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    rows = read_rows(file)
    assert [dict(row.values) for row in rows] == [{"text": "x", "label": "1"}, {"text": 'y"z', "label": "0"}]
    assert all(str(file) in row.place for row in rows)
    assert len(read_rows(file, limit=1)) == 1


@pytest.mark.parametrize("encoding", ["cp932", "utf-16"])
def test_a_table_of_excel_is_read_whatever_its_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_text("本文,評価\nこの表はとても使いやすいです。,良い\n", encoding=encoding)
    rows = read_rows(tmp_path / "a.csv")
    assert [dict(row.values) for row in rows] == [{"本文": "この表はとても使いやすいです。", "評価": "良い"}]


def test_columns_are_renamed_and_a_header_is_given(tmp_path: Path) -> None:
    file = tmp_path / "cola.tsv"
    file.write_text("gj04\t1\t\tGood.\n")
    row = read_rows(file, header=["source", "label", "star", "sentence"], columns={"text": "sentence"})[0]
    assert row.text("text") == "Good." and row.value("label") == "1"


@pytest.mark.parametrize(("columns", "left"), [
    ({"text1": "title", "text2": "text"}, {"tokens", "choices", "title", "text1", "text2"}),
    ({"text": "text", "text2": "title"}, {"choices", "title", "text", "text2"}),
    ({"spans": "title"}, {"text", "choices", "title", "spans"}),
    ({"spans": "title", "tokens": "text"}, {"text", "choices", "title", "spans", "tokens"}),
    ({"choice0": "title"}, {"text", "tokens", "title", "choice0"}),
])  # fmt: skip
def test_named_columns_are_read_and_not_those_beside_them(
    tmp_path: Path, columns: dict[str, str], left: set[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "tokens": "b", "choices": "c", "title": "d"}\n')
    values = read_rows(file, columns=columns)[0].values
    assert values.keys() == left
    assert all(values[name] == {"text": "a", "title": "d"}[own] for name, own in columns.items())


def test_squad_gives_a_row_for_each_question(tmp_path: Path) -> None:
    asked = [{"id": "q0", "question": "Who?", "answers": [{"text": "me", "answer_start": 0}]}, {"question": "When?"}]
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"version": "1", "data": [{"paragraphs": [{"context": "me", "qas": asked}]}]}))
    rows = read_rows(file)
    assert [row.values["question"] for row in rows] == ["Who?", "When?"] and rows[1].values["context"] == "me"
    assert rows[0].place.endswith("question q0")
    file.write_text(json.dumps({"data": [{"paragraphs": [{"qas": asked}]}]}))
    with pytest.raises(UserError, match="as SQuAD has it, stopped at 'context'"):
        read_rows(file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "found none: the file is empty"),
        ("a.csv", "text,label\n", "found none: the file is empty"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[2]\n', "line 2: expected an object with a key for each column, got [2]"),
        ("a.csv", "a,b\n1,2\n3\n", "line 3: expected 2 columns (a, b), got 1"),
        ("a.txt", "x", "expected a name that ends in .jsonl, .json, .csv, .tsv"),
        ("a.json", '{\n"a": 1\n}', 'or an object with "data" as SQuAD'),
        ("a.jsonl.gz", "not gzip", "expected a whole gzip file"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_rows(file)
    assert message in str(refused.value) and str(file) in str(refused.value)


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    file = tmp_path / "a.jsonl"
    file.write_text('{"sentence": "x", "half": "\\ud800"}')
    with pytest.raises(UserError, match=r'a.jsonl, line 1: has no column "sentense"; did you mean "sentence"'):
        read_rows(file, columns={"text": "sentense"})
    with pytest.raises(UserError, match=r"name the one that is meant: --column label=NAME"):
        read_rows(file)[0].value("label")
    with pytest.raises(UserError, match="half of a surrogate pair"):
        read_rows(file)[0].text("half")
    with pytest.raises(UserError, match="text: expected text, got 3"):
        file.write_text('{"text": 3}')
        read_rows(file)[0].text("text")


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"a.parquet: expected a whole parquet file, got a broken one"):
        read_rows(tmp_path / "a.parquet")
    monkeypatch.setattr(parquet, "ParquetFile", MagicMock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):  # a whole file, of which another copy is no help
        read_rows(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(UserError, match=r"a\.jsonl: is a pointer of Git LFS"):
        read_rows(tmp_path / "a.jsonl")

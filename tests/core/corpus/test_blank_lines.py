"""A txt file whose lines are one document, because no blank line separates them, is told."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest

from terakoya.contract.toy import make_tokenizer
from terakoya.corpus.blank_lines import lacks_blank_lines
from terakoya.preparation.prepare import prepare
from terakoya.tokenization.train import train_tokenizer


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        ("一行目\n二行目\n三行目\n", True),
        ("\ufeff一行目\r\n二行目\r\n", True),
        ("一行目\n二行目\n\n\n", True),  # at the end, where they separate nothing
        ("一行目\n\n二行目\n", False),
        ("一行目\r\n\r\n二行目\r\n", False),
        ("一行目\n\u3000\n二行目\n", False),
        ("一行だけ\n", False),
        ("", False),
    ],
)
def test_whether_blank_lines_separate_documents(content: str, lacks: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "c.jsonl").write_bytes(content.encode())
    found = [lacks_blank_lines(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.jsonl")]
    assert found == [lacks, lacks, False]


@pytest.mark.slow
def test_preparing_and_training_a_tokenizer_tell_of_lines_that_are_one_document(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="terakoya")
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "separate.txt").write_text("a b c\n\na b\n")
    (tmp_path / "lines.txt").write_text("a b c\na b\n")
    files = [tmp_path / "separate.txt", tmp_path / "lines.txt"]

    def told(name: str, **options: object) -> tuple[int, list[str]]:
        caplog.clear()
        facts = prepare(files, tokenizer=tmp_path / "tokenizer", out=tmp_path / name, processes=1, **options)
        settings = {"type": "mecab_wordpiece", "word_tokenizer": "basic", "vocab_size": 20}
        trained = train_tokenizer(files, tmp_path / f"{name}.t", settings=settings, processes=1, **options)  # type: ignore[arg-type]
        assert trained["documents"] == facts.documents
        return facts.documents, [line.message for line in caplog.records if "no blank line" in line.message]

    documents, warnings = told("blank")
    assert documents == 3 and len(warnings) == 2 and len(set(warnings)) == 1
    assert warnings[0].startswith(f"{tmp_path / 'lines.txt'}: ") and "did you mean --documents line" in warnings[0]
    assert told("line", documents="line") == (4, [])

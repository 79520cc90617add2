"""What is wrong at the beginnings of files is told by the first command that reads them."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from terakoya.corpus.beginnings import check_beginnings, find_separator
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya.preparation.prepare import prepare
from terakoya.tokenization.train import train_tokenizer
from terakoya_contract.toy import make_tokenizer
from terakoya_corpus.count_words import save_word_counts
from terakoya_planning.corpus_facts import look_at


@pytest.mark.parametrize(
    ("content", "separator"),
    [
        ("一行目\n二行目\n三行目\n", "line"),
        ("\ufeff一行目\r\n二行目\r\n", "line"),
        ("一行目\n二行目\n\n\n", "line"),  # at the end, where they separate nothing
        ("一行目\r二行目\r三行目\r", "line"),
        ("一行目\n\n二行目\n", "blank"),
        ("一行目\r\n\r\n二行目\r\n", "blank"),
        ("一行目\r\r二行目\r", "blank"),
        ("一行目\n\u3000\n二行目\n", "blank"),
        ("一行だけ\n", None),
        ("", None),
    ],
)
def test_what_separates_documents(content: str, separator: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode("utf-16")))
    (tmp_path / "c.jsonl").write_bytes(content.encode())
    found = [find_separator(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.jsonl")]
    assert found == [separator, separator, None]


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


def mixed_folder(folder: Path, bad: int) -> Path:
    """200 documents, of which `bad` are in a file of Korean in EUC-KR."""
    folder.mkdir()
    (folder / "good.txt").write_text(
        "".join(f"文書 {number} です。\n\n" for number in range(200 - bad)), encoding="utf-8"
    )
    (folder / "korean.txt").write_bytes("한국어 문장입니다.\n\n".encode("euc-kr") * bad)
    return folder


@pytest.mark.parametrize("command", ["init", "train", "count"])
def test_the_first_command_that_reads_a_corpus_stops_at_many_rejects(tmp_path: Path, command: str) -> None:
    folder = mixed_folder(tmp_path / "text", 8)
    settings = {"type": "mecab_wordpiece", "word_tokenizer": "basic", "vocab_size": 60}
    calls: dict[str, Callable[[], object]] = {
        "init": lambda: look_at([folder]),
        "train": lambda: train_tokenizer([folder], tmp_path / "out", settings=settings, processes=1),
        "count": lambda: save_word_counts([folder], tmp_path / "out", settings=settings, processes=1),
    }
    with pytest.raises(UserError) as caught:
        calls[command]()
    assert "at most 2 rejected documents" in str(caught.value) and "got 8 of 200 documents" in str(caught.value)
    assert f"rejected in {folder / 'korean.txt'}: 8 bad encoding\nname the encoding of files" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_few_rejects_are_named_by_file_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = mixed_folder(tmp_path / "text", 2)
    settings = {"type": "mecab_wordpiece", "word_tokenizer": "basic", "vocab_size": 60}
    assert train_tokenizer([folder], tmp_path / "out", settings=settings, processes=1)["documents"] == 198
    said = f"rejected 2 of 200 documents (2 bad encoding)\nrejected in {folder / 'korean.txt'}: 2 bad encoding"
    assert [record.message for record in caplog.records if "rejected" in record.message] == [said]
    with pytest.raises(UserError, match="at most 1 rejected documents"):
        look_at([folder], max_rejects=1)
    assert look_at([folder], encoding="euc-kr", max_rejects=0).count == 200


def test_a_few_rejects_at_the_beginning_of_a_large_corpus_do_not_stop(tmp_path: Path) -> None:
    long = json.dumps({"text": "y" * 50_000}) + "\n"
    (tmp_path / "a.jsonl").write_text(long + "{\n" * 10 + long * 60)
    check_beginnings(Corpus([tmp_path / "a.jsonl"]))
    (tmp_path / "a.jsonl").write_text(long + "{\n" * 30 + long * 60)
    with pytest.raises(UserError, match="30 bad JSON"):
        check_beginnings(Corpus([tmp_path / "a.jsonl"]))


@pytest.mark.parametrize("most", ["blank", "line"])
def test_one_odd_file_does_not_change_how_the_others_are_divided(
    most: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blank, line = "一つ目の文書です。\n\n二つ目の文書です。\n", "一つ目の文書です。\n二つ目の文書です。\n"
    common, odd = (blank, line) if most == "blank" else (line, blank)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(common, encoding="cp932")
    (tmp_path / "odd.txt").write_text(odd, encoding="utf-16")
    assert look_at([tmp_path]).documents == most
    assert f"{tmp_path / 'odd.txt'}: " in "".join(r.message for r in caplog.records if r.levelno == logging.WARNING)


def test_files_of_other_endings_in_a_folder_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="terakoya")
    for name in ("a.txt", "b.MD", "c.md", "d.json", "README", ".hidden"):
        (tmp_path / name).write_text("本文です。")
    for _ in range(2):
        assert find_files(tmp_path) == (tmp_path / "a.txt",)
    told = f"{tmp_path}: files are left out whose endings are none of a corpus: .md 2, .json 1, README 1"
    assert caplog.messages == [told]


@pytest.mark.parametrize(("text", "warned"), [('"値は ""x"" です"', True), ('"と書いた', False)])
def test_a_table_with_quoted_texts_is_warned_of(
    text: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.tsv").write_text(f"id\ttext\n1\t{text}\n2\t別の文\n", encoding="utf-16")
    check_beginnings(Corpus((tmp_path / "a.tsv",)))
    told = f"{tmp_path / 'a.tsv'}: has texts in quotation marks, which are text in .tsv; save it as .csv"
    assert (told in caplog.messages) is warned

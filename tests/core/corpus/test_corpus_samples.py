"""Parts of a corpus stand for all of it, however its documents are sorted."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from terakoya.corpus import text_formats
from terakoya.corpus.corpus import Corpus, Document
from terakoya.corpus.samples import read_samples
from terakoya_planning.corpus_facts import look_at


def lengths(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("寺子屋で読み書きを習う", k=rng.randrange(5, 400))) for _ in range(count)]


def write(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".jsonl":
        content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    elif path.suffix == ".tsv":
        content = "number\ttext\n" + "".join(f"{number}\t{text}\n" for number, text in enumerate(texts))
    elif path.stem == "paragraphs":
        content = "".join(text[:3] + "\n" + text[3:] + "\n\n\n" for text in texts)
    else:
        content = "".join(text + "\n" for text in texts)
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize("count", [0, 1, 3, 40, 2_000])
@pytest.mark.parametrize("names", [("a.jsonl",), ("a.tsv",), ("paragraphs.txt",), ("a.txt",), ("a.jsonl", "b.jsonl")])
def test_all_of_a_small_corpus_is_read_once(names: tuple[str, ...], count: int, tmp_path: Path) -> None:
    files, texts = [], list[str]()
    for number, name in enumerate(names):
        made = lengths(number, count + number)
        files.append(write(tmp_path / name, made))
        texts += [text[:3] + "\n" + text[3:] for text in made] if name == "paragraphs.txt" else made
    corpus = Corpus(files, documents="line" if names == ("a.txt",) else "blank")
    found = list(read_samples(corpus))
    assert [document.text for _, documents in found for document in documents] == texts
    assert sum(disk_bytes for disk_bytes, _ in found) == corpus.total_bytes


@pytest.mark.parametrize("name", ["a.jsonl", "a.tsv", "paragraphs.txt"])
def test_the_documents_of_a_part_are_whole(name: str, tmp_path: Path) -> None:
    texts = lengths(1, 3_000)
    known = {text[:3] + "\n" + text[3:] for text in texts} if name == "paragraphs.txt" else set(texts)
    found = list(read_samples(Corpus([write(tmp_path / name, texts)]), 50_000))
    assert len(found) == 16 and all(document.text in known for _, documents in found for document in documents)
    assert 45_000 < sum(disk_bytes for disk_bytes, _ in found) < 70_000


def test_sources_that_follow_each_other_count_alike(tmp_path: Path) -> None:
    english = ["a long text of one source " * 200] * 1_000
    japanese = ["日本語の短い文です。" * 10] * 30_000
    facts = look_at([write(tmp_path / "a.jsonl", english + japanese)])
    assert facts.count == pytest.approx(31_000, rel=0.05)
    assert facts.characters == pytest.approx(sum(map(len, english + japanese)), rel=0.05)
    assert facts.language == "ja" and 0.2 < facts.japanese < 0.6


def test_many_small_files_and_a_large_one(tmp_path: Path) -> None:
    for number in range(80):
        (tmp_path / f"{number:03}.txt").write_text("短い文書です。" * 2_000)
    write(tmp_path / "large.jsonl", ["長い文書です。" * 100] * 4_000)
    facts = look_at([tmp_path])
    assert facts.count == pytest.approx(4_080, rel=0.1)
    assert facts.characters == pytest.approx(80 * 14_000 + 4_000 * 700, rel=0.05)


@pytest.mark.parametrize("name", ["a.jsonl", "paragraphs.txt"])
def test_a_file_whose_documents_are_far_from_each_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_formats, "_FAR", 3 << 20)  # more than the pieces in which a line is read
    long = "あ" * 1_500_000 if name == "a.jsonl" else ("一行" * 500 + "\n") * 1_600
    corpus = Corpus([write(tmp_path / name, [long, *lengths(3, 20_000)])])
    ((disk_bytes, documents),) = read_samples(corpus)
    assert 0 < len(documents) < 20_000 and 4e6 < disk_bytes < 6e6, "its beginning is read, and nothing else"


@pytest.mark.parametrize("kind", ["gz", "csv", "cp932"])
def test_what_is_read_from_its_beginning_only(kind: str, tmp_path: Path) -> None:
    texts = lengths(2, 30_000)
    path = tmp_path / "a.jsonl"
    content = write(path, texts).read_bytes()
    if kind == "gz":
        path.unlink()
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content, 1))
    elif kind == "csv":
        path.unlink()
        (tmp_path / "a.csv").write_text("text\n" + "".join(f'"{text}\n"\n' for text in texts))
    else:
        path.write_bytes(content.decode().encode("cp932"))
    facts = look_at([tmp_path])
    assert facts.count == pytest.approx(30_000, rel=0.1)
    found = list(read_samples(Corpus(tmp_path.glob("a.*"), encoding=None)))  # type: ignore[arg-type]
    assert len(found) == 1 and 4e6 < sum(len(document.text.encode()) for document in found[0][1]) < 8e6


def test_cleaning_gets_the_numbers_of_lines_by_which_it_goes(tmp_path: Path) -> None:
    lines = list[int]()

    class Numbers:
        def apply(self, block: object, items: Iterable[Document]) -> Iterable[Document]:
            for item in items:
                lines.append(item.line)
                yield item

    write(tmp_path / "a.jsonl", lengths(4, 3_000))
    ((_, documents),) = read_samples(Corpus([tmp_path / "a.jsonl"], cleaning=Numbers()), 50_000)  # type: ignore[arg-type]
    assert lines == [*range(1, len(documents) + 1)] and 50 < len(documents) < 500

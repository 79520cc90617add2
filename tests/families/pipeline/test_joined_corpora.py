"""Several corpora as one: each is read in its own way, and counts do not depend on the number of processes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from terakoya.corpus.corpus import Corpus, Document
from terakoya.plugins.cleaning import clean_corpus
from terakoya.toolkit.tokenizers.word_counts import WordCounts, count_words
from terakoya_pipeline.joined_corpora import join_corpora


def _words(text: str) -> list[str]:
    return text.split()


def _splitter() -> object:
    return _words


@pytest.fixture
def corpora(tmp_path: Path) -> list[Corpus]:
    """A csv file read by each of its two columns, a compressed text read by lines, and a cleaned corpus."""
    (tmp_path / "both.csv").write_text("title,body\n" + "".join(f"t{n},b{n} b\n" for n in range(300)))
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress("".join(f"l{n} l\n" for n in range(300)).encode()))
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": f"Ｓ{n % 40} s"}) + "\n" for n in range(120)))
    steps = [{"type": "nfkc"}, {"type": "exact_duplicates"}, {"type": "hold_out", "share": 0.3}]
    some = clean_corpus(Corpus([tmp_path / "some.jsonl"]), steps, tmp_path / "clean", out=tmp_path, processes=1)
    return [
        Corpus([tmp_path / "both.csv"], field="body"),
        Corpus([tmp_path / "lines.txt.gz"], documents="line"),
        Corpus([tmp_path / "both.csv"], field="title"),
        some,
    ]


def _texts(corpus: Corpus, block_bytes: int | None = None) -> list[str]:
    items = [item for block in corpus.blocks(block_bytes=block_bytes) for item in corpus.read(block)]
    return [item.text for item in items if isinstance(item, Document)]


@pytest.mark.parametrize("block_bytes", [100, None])
def test_each_corpus_is_read_in_its_own_way_in_order(corpora: list[Corpus], block_bytes: int | None) -> None:
    together = _texts(join_corpora(corpora), block_bytes)
    assert together == [text for corpus in corpora for text in _texts(corpus)]
    assert together[:1] == ["b0 b"]
    assert together[300:301] == ["l0 l"]
    assert together[600:601] == ["t0"]
    assert 0 < len(together[900:]) < 40
    assert all(text.startswith("S") for text in together[900:])


def test_the_counts_do_not_depend_on_the_processes(corpora: list[Corpus]) -> None:
    def table(processes: int, sample_bytes: int | None) -> WordCounts:
        return count_words(join_corpora(corpora), _splitter, processes=processes, sample_bytes=sample_bytes)

    assert table(1, None) == table(2, None)
    assert table(1, None).documents == len(_texts(join_corpora(corpora)))
    assert list(table(1, 2000).counts) == list(table(2, 2000).counts)


def test_progress_counts_the_bytes_of_all(corpora: list[Corpus]) -> None:
    seen: list[tuple[int, int]] = []
    count_words(join_corpora(corpora), _splitter, progress=lambda done, total: seen.append((done, total)))
    total = sum(file.stat().st_size for corpus in corpora for file in corpus.sources)
    assert seen[-1] == seen[-2] == (total, total)


def test_everything_that_determines_documents_is_in_the_fingerprint(corpora: list[Corpus], tmp_path: Path) -> None:
    def facts() -> object:
        return join_corpora(
            [Corpus(each.sources, field=each.field, documents=each.documents) for each in corpora]
        ).facts

    before = facts()
    assert facts() == before
    assert join_corpora(corpora).facts != before
    assert join_corpora(corpora[::-1]).fingerprint != join_corpora(corpora).fingerprint
    (tmp_path / "some.jsonl").write_text((tmp_path / "some.jsonl").read_text().replace("s", "z"))
    assert facts() != before


def test_one_corpus_is_returned_unchanged(corpora: list[Corpus]) -> None:
    assert join_corpora(corpora[:1]) is corpora[0]

"""Files of word counts: training from the file equals training from the corpus; files of other corpora are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.tokenization.train import train_tokenizer
from terakoya.toolkit.tokenizers import word_counts_file as counts_file
from terakoya.toolkit.tokenizers.word_counts import Splitter
from terakoya.toolkit.tokenizers.word_counts_file import Splitting, load_or_count_words, read_counts, write_counts
from terakoya_corpus.count_words import save_word_counts

TEXTS = ["橋を渡ると、古い茶屋がある。", "茶屋の主人は、橋の話をよくする。\n話は長い。", "bad \u2028 茶屋\0橋"] * 4


def by_spaces() -> Splitter:
    return str.split


SPLITTING = Splitting(by_spaces, {"words": "spaces", "dictionary": "d1"}, max_words=1000)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    file = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in [*TEXTS, "a b a"]]
    file.write_text("\n".join([*lines, "broken"]), encoding="utf-8")
    return Corpus([file], max_rejects=1)


def test_the_counts_that_are_read_are_those_that_were_written(corpus: Corpus, tmp_path: Path) -> None:
    table = load_or_count_words(corpus, SPLITTING)
    write_counts(tmp_path / "table", corpus, SPLITTING, table)
    again = load_or_count_words(corpus, SPLITTING, file=tmp_path / "table")
    assert again == table and list(again.counts) == list(table.counts)
    assert again.counts["a"] == 2 and again.rejected == {"bad JSON": 1}
    assert [file.name for file in tmp_path.iterdir() if "staging" in file.name] == []


def test_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n")
    corpus = Corpus([tmp_path / "a.txt"])
    table = load_or_count_words(corpus, SPLITTING)
    write_counts(tmp_path / "table", corpus, SPLITTING, table)
    assert read_counts(tmp_path / "table", corpus, SPLITTING) == table and not table.counts


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"identity": {"words": "spaces", "dictionary": "d2"}}, 'dictionary: expected "d2", got .* "d1"'),
        ({"identity": {"words": "spaces"}}, "dictionary: expected none"),
        ({"max_words": 2000}, "max_words: expected 2000, got .* 1000"),
        ({"sample_bytes": 500}, "sample_bytes: expected 500, got .* none"),
    ],
)
def test_a_table_of_other_settings_is_refused(
    changed: dict[str, Any], name: str, corpus: Corpus, tmp_path: Path
) -> None:
    write_counts(tmp_path / "table", corpus, SPLITTING, load_or_count_words(corpus, SPLITTING))
    fields = {"splitter": by_spaces, "identity": SPLITTING.identity, "max_words": 1000, **changed}
    with pytest.raises(UserError, match=f"table: settings: {name}"):
        read_counts(tmp_path / "table", corpus, Splitting(**fields))


def test_a_table_of_another_corpus_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_counts(table, corpus, SPLITTING, load_or_count_words(corpus, SPLITTING))
    other_field = Corpus(corpus.sources, field="body", max_rejects=1.0)
    with pytest.raises(UserError, match=r'corpus: field: expected "body", got .* "text"'):
        read_counts(table, other_field, SPLITTING)
    assert read_counts(table, Corpus(corpus.sources, block_bytes=100), SPLITTING).documents == len(TEXTS) + 1
    file = tmp_path / "corpus.jsonl"
    file.write_text(file.read_text().replace("橋", "箸", 1))
    with pytest.raises(UserError, match="corpus: files: expected"):
        read_counts(table, Corpus([file]), SPLITTING)


def test_broken_tables_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    table = tmp_path / "table"
    with pytest.raises(UserError, match="found no file"):
        read_counts(table, corpus, SPLITTING)
    write_counts(table, corpus, SPLITTING, load_or_count_words(corpus, SPLITTING))
    content = table.read_bytes()
    for broken in (content[:-1], content[:-1] + b"?"):
        table.write_bytes(broken)
        with pytest.raises(UserError, match="damaged or cut short"):
            read_counts(table, corpus, SPLITTING)
    for broken in (b"", b'{"text": 1}\n', content[:40], b"terakoya word counts 1\nnot json\n"):
        table.write_bytes(broken)
        with pytest.raises(UserError, match="table"):
            read_counts(table, corpus, SPLITTING)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mecab_wordpiece", {"vocab_size": 60, "dictionary": "ipadic"}),
        ("byte_bpe", {"vocab_size": 300}),
    ],
)
def test_a_tokenizer_learns_the_same_from_the_table(
    kind: str, fields: dict[str, Any], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"type": kind, **fields}
    for processes in (1, 2):
        save_word_counts(
            corpus.sources, tmp_path / str(processes), settings=settings, processes=processes, max_rejects=1
        )
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    straight = train_tokenizer(corpus, tmp_path / "straight", settings=settings)
    monkeypatch.setattr(counts_file, "count_words", None)  # nothing is counted twice
    kept = train_tokenizer(corpus, tmp_path / "kept", settings={**settings, "counts": str(tmp_path / "1")})
    assert straight == kept
    for file in (tmp_path / "straight").iterdir():
        assert file.read_bytes() == (tmp_path / "kept" / file.name).read_bytes()


def test_another_dictionary_is_named(corpus: Corpus, tmp_path: Path) -> None:
    given = {"type": "mecab_wordpiece", "dictionary": "ipadic"}
    save_word_counts(corpus.sources, tmp_path / "t", settings=given, max_rejects=1)
    settings = {"type": "mecab_wordpiece", "vocab_size": 60, "counts": str(tmp_path / "t")}
    with pytest.raises(UserError, match="dictionary: expected"):
        train_tokenizer(corpus, tmp_path / "out", settings=settings)


def test_tokenizers_that_do_not_use_counts_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    sources = list(corpus.sources)
    with pytest.raises(UserError, match="huggingface: expected a kind that learns from word counts"):
        save_word_counts(sources, tmp_path / "t", settings={"type": "huggingface"})
    (tmp_path / "t").write_text("")
    with pytest.raises(UserError, match="expected a new file"):
        save_word_counts(sources, tmp_path / "t", settings={"type": "byte_bpe"})

"""Counting words: exact, the same for any number of processes, in bounded memory with a known error."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.word_counts import count_words


def by_spaces() -> Callable[[str], Iterable[str]]:
    return str.split


def dying() -> Callable[[str], Iterable[str]]:
    return lambda text: os._exit(9)


def zipf_corpus(file: Path, *, documents: int) -> tuple[Corpus, Counter[str]]:
    """A corpus with few frequent and very many rare words, and its true counts."""
    draw = random.Random(0)
    truth: Counter[str] = Counter()
    with gzip.open(file, "wt", encoding="utf-8") as out:
        for _ in range(documents):
            words = [f"語{int(draw.paretovariate(0.5))}" for _ in range(100)]
            truth.update(words)
            out.write(json.dumps({"text": " ".join(words)}, ensure_ascii=False) + "\n")
    return Corpus([file]), truth


def test_counts_are_exact_and_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    corpus, truth = zipf_corpus(tmp_path / "a.jsonl.gz", documents=300)
    one, two = (count_words(corpus, by_spaces, processes=processes) for processes in (1, 2))
    assert one.counts == dict(truth) and one.error == 0
    assert one == two
    assert list(one.counts) == list(two.counts)
    assert one.words == sum(truth.values()) and one.documents == 300


@pytest.mark.parametrize("max_words", [10, 300, 3000])
def test_pruned_counts_are_within_the_error(tmp_path: Path, max_words: int) -> None:
    corpus, truth = zipf_corpus(tmp_path / "a.jsonl.gz", documents=800)
    table = count_words(corpus, by_spaces, max_words=max_words)
    assert table.error > 0 and len(table.counts) <= max_words
    for word, count in truth.items():
        kept = table.counts.get(word, 0)
        assert count - table.error <= kept <= count
    assert table.words == sum(truth.values())


def test_pruning_does_not_depend_on_processes(tmp_path: Path) -> None:
    corpus, _ = zipf_corpus(tmp_path / "a.jsonl.gz", documents=400)
    one, two = (count_words(corpus, by_spaces, processes=processes, max_words=400) for processes in (1, 2))
    assert one == two and one.error > 0


def test_a_sample_has_about_the_requested_size_and_is_spread_over_the_corpus(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"part{number // 1000} " + "word " * 200}) for number in range(8000)]
    file.write_text("\n".join(lines))
    corpus = Corpus([file])
    table = count_words(corpus, by_spaces, sample_bytes=1_000_000)
    assert 700_000 <= table.text_bytes <= 1_100_000
    assert {f"part{number}" for number in range(8)} <= set(table.counts)
    assert table == count_words(corpus, by_spaces, processes=2, sample_bytes=1_000_000)


def test_a_sample_of_parquet_has_about_the_requested_size(tmp_path: Path) -> None:
    table = pa.table({"text": [f"part{number // 1000} " + "word " * 200 for number in range(4000)]})
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20, **options)
    counted = count_words(Corpus([tmp_path / "a.parquet"]), by_spaces, sample_bytes=1_000_000)
    assert 700_000 <= counted.text_bytes <= 1_100_000


def test_text_bytes_are_those_of_the_text_and_not_of_the_keys_beside_it(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "東京 は 夜", "title": "x" * 99}) for _ in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table = count_words(Corpus([tmp_path / "a.jsonl"]), by_spaces)
    assert table.text_bytes == 30 * len("東京 は 夜".encode())


def test_progress_and_rejects(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a b"}\nnot json\n{"other": 1}\n{"text": "b"}\n')
    calls: list[tuple[int, int]] = []
    corpus = Corpus([file], max_rejects=2)
    table = count_words(corpus, by_spaces, progress=lambda done, total: calls.append((done, total)))
    assert table.counts == {"a": 1, "b": 2}
    assert table.rejected == {"bad JSON": 1, "missing field": 1} and table.documents == 2
    assert calls[-1] == (file.stat().st_size, file.stat().st_size)


def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    corpus, _ = zipf_corpus(tmp_path / "a.jsonl.gz", documents=10)
    with pytest.raises(UserError, match="counting words: a worker process died"):
        count_words(corpus, dying, processes=2)


def test_wrong_arguments(tmp_path: Path) -> None:
    corpus, _ = zipf_corpus(tmp_path / "a.jsonl.gz", documents=1)
    with pytest.raises(UserError, match="at least 1"):
        count_words(corpus, by_spaces, max_words=0)

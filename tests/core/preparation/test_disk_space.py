"""The estimated size of a store is about right for any corpus, and a wrong estimate stops no run."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_preparation import prepare_corpus
from word_tokenizer import WordTokenizer, make_folder

from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.preparation import disk_space as disk_need
from terakoya.preparation.disk_space import check_disk_space, estimate_store
from terakoya.store.token_store import TokenStore

TOKEN = re.compile(r"x+|[^x\n]")
"""A run of x of any length is one token, like unknown characters in SentencePiece."""


def run_encoder(*, eos: int | None = None) -> Any:
    def sample(texts: Sequence[str]) -> SimpleNamespace:
        return SimpleNamespace(ids=np.zeros(sum(len(TOKEN.findall(text)) for text in texts)))

    return SimpleNamespace(sample=sample, eos=eos, encoder=SimpleNamespace(vocabulary=Vocabulary(size=100)))


def write(file: Path, texts: Sequence[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return file


def short_texts(count: int) -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choices("寺子屋で読み書き", k=rng.randrange(5, 60))) for _ in range(count)]


@pytest.mark.parametrize("giant", ["x" * 100_000, "".join(short_texts(3_000))], ids=["a run", "ordinary text"])
@pytest.mark.parametrize("place", [0, 700, 1_400])
def test_one_giant_line_among_short_ones(tmp_path: Path, giant: str, place: int) -> None:
    texts = short_texts(1_400)
    texts.insert(place, giant)
    files = [write(tmp_path / "a.jsonl", texts)]
    corpus = Corpus(files)
    need = estimate_store(corpus, run_encoder(), corpus.total_bytes, unit="document")
    true = sum(len(TOKEN.findall(text)) for text in texts)
    assert need is not None and 0.85 < need.tokens / true < 1.15, (need, true)


def test_files_count_in_proportion_to_their_text(tmp_path: Path) -> None:
    short = short_texts(2_000)
    corpus = Corpus([write(tmp_path / "a.jsonl", ["x" * 500] * 10), write(tmp_path / "b.jsonl", short)])
    need = estimate_store(corpus, run_encoder(eos=5), corpus.total_bytes, unit="document")
    true = 10 + sum(map(len, short)) + 2_010
    assert need is not None and 0.95 < need.tokens / true < 1.05


def test_lines_and_documents_are_counted(tmp_path: Path) -> None:
    corpus = Corpus([write(tmp_path / "a.jsonl", ["a\nb\n\nc\nd"] * 100_000)])
    bytes_of = {
        unit: estimate_store(corpus, run_encoder(), corpus.total_bytes, unit=unit) for unit in ("line", "document")
    }  # type: ignore[arg-type]
    line, document = bytes_of["line"], bytes_of["document"]
    assert line is not None and document is not None
    assert line.store_bytes - document.store_bytes == pytest.approx(1.05 * 12 * 300_000, rel=0.01)
    tokens = 400_000 * (2 + 1 / 8)
    assert document.store_bytes == pytest.approx(1.05 * (tokens + 20 * 100_000) + 1_000_000, rel=0.05)


def test_little_text_is_encoded(tmp_path: Path) -> None:
    sampled: list[str] = []
    encoder = run_encoder()
    real = encoder.sample
    encoder.sample = lambda texts: (sampled.extend(texts), real(texts))[1]
    files = [write(tmp_path / f"{n}.jsonl", ["a" * 1_000_000, *short_texts(3_000)]) for n in range(10)]
    corpus = Corpus(files)
    estimate_store(corpus, encoder, corpus.total_bytes, unit="document")
    assert 0 < sum(map(len, sampled)) <= 128 * 256


def test_samples_without_text_give_no_estimate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="terakoya")
    (tmp_path / "a.jsonl").write_text("{\n" * 100)
    corpus = Corpus([tmp_path / "a.jsonl"])
    check_disk_space(tmp_path, corpus, run_encoder(), corpus.total_bytes, unit="document")
    assert "disk needed: unknown" in caplog.text


def test_only_less_than_half_of_the_estimate_stops_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="terakoya")
    corpus = Corpus([write(tmp_path / "a.jsonl", short_texts(1_000))])
    need = estimate_store(corpus, run_encoder(), corpus.total_bytes, unit="document")
    assert need is not None
    real = shutil.disk_usage
    free = 0
    monkeypatch.setattr(disk_need.shutil, "disk_usage", lambda _: real("/")._replace(free=free))

    def check() -> None:
        check_disk_space(tmp_path, corpus, run_encoder(), corpus.total_bytes, unit="document")

    free = 2 * need.store_bytes
    check()
    assert "may be needed" not in caplog.text
    free = need.store_bytes
    check()
    assert "may be needed" in caplog.text and "finished parts are kept" in caplog.text
    free = need.store_bytes - 1
    with pytest.raises(UserError, match="expected about 2 MB of free disk, got 1 MB; make room"):
        check()
    (tmp_path / ".parts").mkdir()
    (tmp_path / ".parts" / "000000.part").write_bytes(b"1")
    check()


def test_the_logged_estimate_is_close_to_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="terakoya")
    words = [" ".join(text[at : at + 4] for at in range(0, len(text), 4)) for text in short_texts(3_000)]
    corpus = Corpus([write(tmp_path / "a.jsonl", words)])
    prepare_corpus(corpus, WordTokenizer(), make_folder(tmp_path / "tokenizer"), tmp_path / "out", append_eos=True)
    estimate = re.search(r"about ([\d,]+) tokens; disk needed", caplog.text)
    assert estimate is not None
    made = TokenStore.open(tmp_path / "out").facts.tokens
    assert 0.9 < int(estimate[1].replace(",", "")) / made < 1.1

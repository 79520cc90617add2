"""The comparison of whole-word masking: its intervals, and at night a toy run of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_vocabularies import train_tokenizers
from tool_modules import load_tool

import terakoya


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_tool("bench/whole_words")


def test_an_interval_is_that_of_student(bench: Any) -> None:
    mean, half = bench.interval([1.0, 2.0, 4.5])  # deviation 1.80278, times 4.30265 / sqrt(3)
    assert mean == pytest.approx(2.5) and half == pytest.approx(4.47834, rel=1e-4)


def test_a_word_is_right_if_all_its_predicted_tokens_are(bench: Any) -> None:
    starts = np.array([[False, True, False, True, False], [False, False, True, True, False]])
    positions = np.array([1, 2, 3, 5, 6, 8, 9])  # words 1 2, 3, and in the second row 5 6 and 8 9
    right = np.array([True, False, True, True, True, False, False])
    assert bench.words_right(starts, positions, right).tolist() == [False, True, True, False]


@pytest.mark.nightly
def test_both_ways_of_masking_are_compared(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(terakoya.__file__).parent / "pipeline" / "demo_corpus.txt").read_text(encoding="utf-8")[:12_000]
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8")
    (tmp_path / "bytes").mkdir()
    train_tokenizers(tmp_path / "bytes", text, "bytes")
    store = tmp_path / "store"
    terakoya.prepare([tmp_path / "corpus.txt"], tokenizer=tmp_path / "bytes", out=store, processes=1, words="mecab")
    sizes = ["--seeds", "2", "--steps", "2", "--hidden-size", "16", "--layers", "1", "--rows", "8"]
    assert (
        bench.main(["--store", str(store), "--validation", str(store), "--work", str(tmp_path / "runs"), *sizes]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert sum(bool(re.match(r"(whole words|single tokens) +[01] ", line)) for line in lines) == 4
    assert sum("from " in line and " to " in line for line in lines) == 6

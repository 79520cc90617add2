"""`tools/bench/transplant.py` measures how soon a transplanted model is as good as one from scratch."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest
from tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[2]
transplant = load_tool("bench/transplant")


def test_tokens_are_counted_to_the_line_between_two_validations() -> None:
    curve = [(0, 9.0), (100, 8.0), (200, 8.5), (300, 7.0)]
    assert transplant.tokens_to_reach(8.25, curve) == 75
    assert transplant.tokens_to_reach(7.75, curve) == 250
    assert transplant.tokens_to_reach(9.5, curve) == 0
    assert transplant.tokens_to_reach(6.5, curve) == float("inf")


@pytest.mark.nightly
def test_every_way_trains_and_is_measured(tmp_path: Path) -> None:
    text = (ROOT / "core" / "terakoya" / "pipeline" / "demo_corpus.txt").read_text(encoding="utf-8").split("\n\n")
    for name, texts in (("corpus", text[:60]), ("validation", text[60:70])):
        lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = argparse.Namespace(
        corpus=tmp_path / "corpus.jsonl.gz", validation=tmp_path / "validation.jsonl.gz", documents=30,
        vocab_size=1000, hidden_size=16, source_steps=2, steps=[2, 4], transplant_steps=4, every=2, seeds=1,
    )  # fmt: skip
    (needed,) = transplant.measure(options, tmp_path)
    assert list(needed) == [2, 4] and list(needed[4]) == ["scratch", *transplant.WAYS]
    assert 0 < needed[2]["scratch"] < needed[4]["scratch"] < float("inf")

"""The comparison of tokenizers by the names that models find over them, at toy size."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
WORDS = [
    ("太郎", "名詞-固有名詞-人名-名"),
    ("は", "助詞-係助詞"),
    ("京都", "名詞-固有名詞-地名-一般"),
    ("へ", "助詞-格助詞"),
]


def test_each_tokenizer_gets_the_same_examples_and_a_score(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], forks: None
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import names

    monkeypatch.setattr(names, "TOKENIZERS", {"WordPiece": ["--type", "mecab_wordpiece"]})
    monkeypatch.setattr(names, "PROBE_STEPS", 4)
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"太郎は京都へ{number}回行った。"}, ensure_ascii=False) for number in range(200)]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = "\n".join(f"{number}\t{form}\t_\t_\t{speech}\t_" for number, (form, speech) in enumerate(WORDS, 1))
    for name in ("dev", "test"):
        with gzip.open(tmp_path / f"ja_gsd-ud-{name}.conllu.gz", "wt", encoding="utf-8") as out:
            out.write(f"# text = 太郎は京都へ\n{rows}\n\n" * 4)
    command = [str(corpus), "--gsd", str(tmp_path), "--work", str(tmp_path / "work"), "--vocab-size", "60"]
    assert names.main([*command, "--steps", "4", "--seeds", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"\| WordPiece \| \d\.\d{3} ± \d+\.\d{3} \| 1\.000 \|", line)
    runs = [{"finetuned": {"gsd": {"scores": {"eval": {
        kind: {"mean": value} for kind, value in (("f1", f1), ("recall", 0.4), ("recall_limit", 0.9))
    }}}}} for f1 in (0.4, 0.5)]  # fmt: skip
    names.print_table({"A": runs, "B": runs[:1] * 2}, ["gsd"])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| A | 0.450 ± 0.635 | 0.900 |", "| B | 0.400 ± 0.000 (-0.050) | 0.900 |"
    ]  # fmt: skip
    example = json.loads((tmp_path / "work/data/gsd/train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert example["spans"] == [{"start": 0, "end": 2, "label": "PER"}, {"start": 3, "end": 5, "label": "LOC"}]
    settings = json.loads((tmp_path / "work/0/run-2/parameters.json").read_text(encoding="utf-8"))
    assert settings["seed"] == 2 and settings["objective"]["whole_word_mask"] is True

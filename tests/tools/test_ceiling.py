"""`tools/bench/ceiling.py` measures the encoder beside MeCab, at toy size, and compares its ids by both roads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tool_modules import TOOLS, load_tool

from terakoya.corpus.corpus import Corpus
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece
from terakoya_tokenizer import mecab, word_cache
from terakoya_tokenizer.kernels import load_kernels

TEXT = "寺子屋では、読み書きとそろばんを習った。\n先生は町の人で、束脩は米や炭だった。"


@pytest.mark.slow
@pytest.mark.skipif(load_kernels() is None, reason="needs a C compiler")
def test_the_encoder_is_measured_beside_mecab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS / "bench"))
    monkeypatch.setattr(mecab, "MECAB_CHARACTERS", 0)
    monkeypatch.setattr(word_cache, "_MANY", 0)
    corpus = tmp_path / "text.jsonl.gz"
    corpus.write_bytes(gzip.compress("".join(json.dumps({"text": TEXT * n}) + "\n" for n in range(1, 9)).encode()))
    MecabWordPiece(vocab_size=200, limit_alphabet=60).train(Corpus([corpus]), tmp_path / "tokenizer")
    ceiling = load_tool("bench/ceiling")
    command = [str(corpus), "--tokenizer", str(tmp_path / "tokenizer"), "--rounds", "1"]
    assert ceiling.main([*command, "--goal", "0"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| encoder")]
    assert [row.split(" | ")[0] for row in rows] == ["| encoder", "| encoder without a C compiler"]
    assert ceiling.main([*command, "--goal", "1e9"]) == 1
    monkeypatch.setattr(ceiling.splitting.Lattice, "split", lambda self, lines: ["違う"] * len(lines))
    with pytest.raises(SystemExit, match="differ"):
        ceiling.main(command)

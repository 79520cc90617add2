"""`tools/bench/pieces.py` times an encoder beside the library of its tokenizer, and compares their ids."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from terakoya.corpus.corpus import Corpus
from terakoya_plugins.tokenizers.byte_bpe import ByteBpe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_ids_are_compared_in_each_round(tmp_path: Path, forks: None) -> None:
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "tokenizer"
    texts = [f"{number}冊目の本を図書館で借りて読みました。\n面白い。" for number in range(20)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    ByteBpe(vocab_size=300).train(Corpus([corpus]), folder)
    arguments = [corpus, "--tokenizer", folder, "--other", ROOT, "--rounds", "2"]
    command = [sys.executable, ROOT / "tools/bench/pieces.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for kind in ("ours", "other", "tokenizers"):
        assert re.search(rf"^\| {kind} \| \d+\.\d\d \| \d+\.\d\d x \| 2 of 2 \| [1-9][\d,]* \|$", result.stdout, re.M)

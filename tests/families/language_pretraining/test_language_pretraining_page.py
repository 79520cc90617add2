"""The page for those who come from language-pretraining: its commands, typed in order at the size of a toy, with a
parameter.json as that project has it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import toy
import transformers
from command_line import exit_code
from documented_commands import ROOT
from followed_pages import blocks_of
from language_pretraining_checkpoints import save_pair

from terakoya_language_pretraining.entries import SHIPPED

PAGE = "docs/coming-from/language-pretraining.md"
SMALL = [
    "architecture.hidden_size=16", "architecture.num_hidden_layers=1", "architecture.num_attention_heads=2",
    "architecture.intermediate_size=32", 'batch_size={"-1": 2}', "max_steps=2", "schedule.warmup_steps=1",
]  # fmt: skip
"""What `train` sets in addition."""


@pytest.mark.nightly
def test_its_commands_do_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.start_fork_server()  # `prepare` and `export` use it
    monkeypatch.chdir(tmp_path)
    entries = json.loads(SHIPPED.read_text())
    original = {name: {**entry, "fp16-type": 0, "bf16": False} for name, entry in entries.items()}
    Path("parameter.json").write_text(json.dumps(original))
    town = ROOT / "core" / "terakoya" / "corpus" / "demo_town.txt"
    Path("corpus.txt").write_text(town.read_text(encoding="utf-8"), encoding="utf-8")
    printed = ""
    for block in (block for block in blocks_of(PAGE) if block.kind == "not run"):
        for line in block.content.replace("\\\n", " ").splitlines():
            words = shlex.split(line)[1:]
            if words[:2] == ["tokenizer", "import"]:
                shutil.copytree("work/tokenizer", Path(words[2]).parent, ignore=lambda *_: ["tokenizer_config.json"])
            if words[0] == "import":
                vocabulary = Path("work/tokenizer/vocab.txt").read_text(encoding="utf-8")
                save_pair(Path(words[2]), vocab_size=vocabulary.count("\n"))
            small = [word for each in SMALL for word in ("--set", each)] if words[0] == "train" else []
            given = [*("1500" if word == "32768" else word for word in words), *small]
            assert exit_code(*given) == 0, given
            printed += capsys.readouterr().out
    assert "optimizer.bias_correction" in printed and "1450000" in printed
    assert transformers.AutoModelForPreTraining.from_pretrained("work/model").config.num_hidden_layers == 1
    pieces = [Path(f"work/{name}/vocab.txt").read_text(encoding="utf-8") for name in ("tokenizer", "imported")]
    assert pieces[0] == pieces[1]
    for folder in ("generator", "discriminator"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"work/electra/{folder}")
        made = transformers.AutoTokenizer.from_pretrained("work/tokenizer")
        assert tokenizer("町の図書館で本を借りた。").input_ids == made("町の図書館で本を借りた。").input_ids

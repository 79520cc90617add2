"""The commands of how-to pages are run in order by a reader who has a small corpus and a trained model."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from documented_commands import ROOT
from typer.testing import CliRunner

from terakoya.commands.main import app
from test_tutorials import run

PAGES = ("stores", "publish", "watch")
LEFT_OUT = {
    "--private": "it pushes to the Hub",
    "--live": "it runs until Ctrl-C; tests/core/runs/test_report_in_a_browser.py opens it",
}
"""Commands that a test cannot run, by a word of theirs."""
COMMAND = re.compile(r"^terakoya .*?(?=\s+#\s|$)", re.M)


def commands_of(page: str) -> list[str]:
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    blocks = [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if not kind]
    return [line.replace(" --watch", "") for block in blocks for line in COMMAND.findall(block)]


def write_corpora(folder: Path) -> None:
    """Writes the corpora that the pages name, of the documents that come with terakoya."""
    text = (ROOT / "core" / "terakoya" / "pipeline" / "demo_corpus.txt").read_text(encoding="utf-8")
    documents = text.split("\n\n")
    (folder / "corpus").mkdir()
    for name, part in (("corpus/a", documents[0::3]), ("corpus/b", documents[1::3]), ("validation", documents[2::6]),
                       ("held_out", documents[5::60])):  # fmt: skip
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in part)


@pytest.mark.nightly
def test_the_commands_work_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpora(tmp_path)
    run(["terakoya", "tokenizer", "train", "corpus/a.jsonl.gz", "--type", "mecab_wordpiece", "--vocab-size", "3000",
         "--out", "work/tokenizer"], 0)  # fmt: skip
    for page in PAGES:
        ran = 0
        for line in commands_of(f"{page}.md"):
            if any(word in line for word in LEFT_OUT):
                continue
            if line.startswith("terakoya store import "):  # tokens that Megatron made
                for ending in ("bin", "idx"):
                    shutil.copyfile(f"work/store/tokens.{ending}", f"old_text_document.{ending}")
            if line.startswith("terakoya export "):
                train(tmp_path)
            words = expand(line.replace("998,1,1", "8,1,1"))  # 300 documents have no thousandth part
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, f"{page}: {line}\n{result.output}\n{result.exception!r}"
            ran += 1
        assert ran >= 2, page
    assert (tmp_path / "work/measured/README.md").read_text(encoding="utf-8").count("held_out.jsonl.gz") > 1
    assert (tmp_path / "report.html").is_file()


def train(folder: Path) -> None:
    """Trains a small model in work/run, and copies it to the runs that are compared."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    sets = [f"architecture.{name}={value}" for name, value in small.items()]
    sets += ["max_steps=2", "schedule.warmup_steps=1", "batch_size.-1=2", "evaluation.steps=2", "evaluation.batches=1"]
    run(
        ["terakoya", "train", "tiny_bert", "--out", "work/run", *(word for each in sets for word in ("--set", each))], 0
    )
    for name in ("a", "b"):
        shutil.copytree(folder / "work/run", folder / "work" / name)


def expand(line: str) -> list[str]:
    """Returns the words of a command as a shell gives them: quotes removed, patterns replaced by files."""
    words: list[str] = []
    for word in shlex.split(line):
        words += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    return words


def test_every_command_that_is_left_out_has_its_reason() -> None:
    lines = [line for page in PAGES for line in commands_of(f"{page}.md")]
    assert len(lines) > 15
    for word in LEFT_OUT:
        assert any(word in line for line in lines), word

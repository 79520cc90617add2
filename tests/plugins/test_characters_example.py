"""The example tokenizer of characters: decoding restores every character, and a model learns to write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import exit_code
from transformers import AutoTokenizer

import terakoya_contract as contract
from terakoya.store.token_store import TokenStore

pytestmark = pytest.mark.usefixtures("fresh_plugins")

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "examples" / "characters.py"
PLAY = "ROSE:\nIs it the wind?\n\n  THORN:\nNo, it is the rain,\tmy friend.\n\n" * 30


def call(*arguments: str) -> None:
    assert exit_code("--plugin", PLUGIN, *arguments) == 0


def test_it_passes_the_checks_of_a_tokenizer() -> None:
    found = contract.check_plugin(str(PLUGIN), train=False)
    assert [str(each) for each in found if each.status in ("failed", "warning")] == []


def test_every_character_is_a_token_and_a_model_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("play.jsonl").write_text(json.dumps({"text": PLAY}) + "\n", encoding="utf-8")
    call("tokenizer", "train", "play.jsonl", "--type", "characters", "--out", "work/characters")
    tokenizer = AutoTokenizer.from_pretrained("work/characters")
    pieces = sorted(set(PLAY))
    assert len(tokenizer) == len(pieces) + 1, "and one for any other"
    ids = tokenizer("the rain\n\n?")["input_ids"]
    assert [pieces[each] for each in ids] == list("the rain\n\n?")
    assert tokenizer.decode(ids) == "the rain\n\n?"
    call("prepare", "play.jsonl", "--tokenizer", "work/characters", "--out", "work/store")
    stored = TokenStore.open(tmp_path / "work/store").tokens
    np.testing.assert_array_equal(stored, [pieces.index(each) for each in PLAY])
    call(
        "train", str(PLUGIN.parents[2] / "parameters/shakespeare_char.json"), "--out", "work/run",
        "--set", "data.validation=[]", "--set", "evaluation=null", "--set", "max_steps=3", "--set", "logging_steps=1",
        "--set", "schedule.warmup_steps=1",
    )  # fmt: skip
    lines = [json.loads(line) for line in Path("work/run/metrics.jsonl").read_text().splitlines()]
    losses = [line["lm_loss"] for line in lines if line["kind"] == "step"]
    assert losses[2] < losses[0] < 1.05 * np.log(len(pieces) + 1)
    capsys.readouterr()
    call("try", "work/run", "ROSE:\nIs it ", "--max-new-tokens", "5")
    assert capsys.readouterr().out.startswith("ROSE:\nIs it ")

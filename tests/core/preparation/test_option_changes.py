"""The message about a store with other options names only the differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code

from terakoya.preparation.resuming import describe_changes
from terakoya.store.recorded_options import SHARD_BLOCKS

WORDS = {"special_tokens_in_text": "parse", "vocab_size": 32768, "dictionary": "unidic_lite"}


def tokenizer(kind: str = "MecabWordPiece", **settings: Any) -> str:
    return f"{kind} {json.dumps({**WORDS, **settings})}"


def clean(*steps: dict[str, Any]) -> str:
    return json.dumps({"version": 1, "steps": steps, "side": "train"})


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"unit": "line", "append_eos": True}, {"unit": "line", "append_eos": True}, []),
        ({"unit": "document", "field": "a"}, {"unit": "line", "field": "a"}, ["unit: was 'document', is now 'line'"]),
        (
            {"tokenizer": tokenizer()},
            {"tokenizer": tokenizer("MecabCharacter")},
            ["tokenizer: was MecabWordPiece, is now MecabCharacter"],
        ),
        (
            {"tokenizer": tokenizer(split=["a"])},
            {"tokenizer": tokenizer(vocab_size=100, split=["b"])},
            ["tokenizer.vocab_size: was 32768, is now 100", "tokenizer.split: was ['a'], is now ['b']"],
        ),
        (
            {"clean": clean({"type": "nfkc"}, {"type": "length", "min_characters": 3}), "clean: dropped": 3},
            {"clean": clean({"type": "nfkc"}, {"type": "length", "min_characters": 4}), "clean: dropped": 5},
            ["clean.steps.1.min_characters: was 3, is now 4"],
        ),
        (
            {"clean": clean({"type": "nfkc"}, {"type": "length"})},
            {"clean": clean({"type": "length"})},
            ["clean.steps: was nfkc + length, is now length"],
        ),
        ({"clean": clean({"type": "nfkc"}), "clean: dropped": 3}, {}, ["clean: was nfkc, is now nothing"]),
        ({"clean: dropped": 3}, {"clean: dropped": 5}, ["clean: dropped: was 3, is now 5"]),
        ({"shard": "1/2", SHARD_BLOCKS: "0-3 of 9"}, {"shard": "2/2"}, ["shard: was '1/2', is now '2/2'"]),
        ({"field": "{no JSON"}, {"field": "b" * 500}, [f"field: was '{{no JSON', is now '{'b' * 56}..."]),
    ],
)
def test_only_differences_are_described(old: dict[str, object], new: dict[str, object], lines: list[str]) -> None:
    assert list(describe_changes(old, new)) == lines


def test_another_type_of_tokenizer_is_described_in_one_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("庭の池に、赤い魚がいる。\n\n魚は池の底で休む。\n", encoding="utf-8")
    for kind in ("mecab_wordpiece", "mecab_character"):
        call("tokenizer", "train", text, "--type", kind, "--out", tmp_path / kind)
    call("prepare", text, "--tokenizer", tmp_path / "mecab_wordpiece", "--out", tmp_path / "store")
    capsys.readouterr()
    code = call("prepare", text, "--tokenizer", tmp_path / "mecab_character", "--out", tmp_path / "store")
    message = "changed: tokenizer, options (tokenizer: was MecabWordPiece, is now MecabCharacter). Choose another --out"
    assert code == 2 and message in capsys.readouterr().err


def call(*arguments: object) -> int:
    return exit_code(*arguments, "--processes", 1)

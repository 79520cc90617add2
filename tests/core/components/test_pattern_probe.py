"""A regular expression that would stop tokenizers ends in an error that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from terakoya.components import pattern_probe
from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.line_encoder import LineEncoder

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
HOSTILE = "(a+)+$"


def make(folder: Path, pattern: str) -> Path:
    """A tokenizer that splits texts with `pattern`."""
    backend = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_a_hostile_pattern_is_refused_by_name(tmp_path: Path) -> None:
    folder = make(tmp_path / "hostile", HOSTILE)
    with pytest.raises(UserError) as error:
        load_tokenizer(folder)
    assert f"{folder}/tokenizer.json: the regular expression {json.dumps(HOSTILE)}" in str(error.value)
    assert "retry-limit" in str(error.value) and "Traceback" not in str(error.value)


def test_a_pattern_in_use_passes_and_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "llama", LLAMA_3)
    assert load_tokenizer(folder)("aa")["input_ids"] == [1]

    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a second process")

    monkeypatch.setattr(pattern_probe.subprocess, "run", no_process)
    load_tokenizer(folder)


def test_a_pattern_that_takes_too_long_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_probe, "LIMIT_SECONDS", 0.01)
    with pytest.raises(UserError, match=r"took more than 0\.01 s"):
        load_tokenizer(make(tmp_path / "slow", "slow|pattern"))


def test_a_panic_while_texts_are_encoded_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "hostile", HOSTILE)
    monkeypatch.setattr(pattern_probe, "check", lambda folder: None)
    encoder = LineEncoder(load_tokenizer(folder), parse=True)
    with pytest.raises(UserError, match=r'the tokenizer cannot encode the text "a{60}\.\.\.": .*retry-limit'):
        encoder.encode(["short", "a" * 100 + "b", "short"])

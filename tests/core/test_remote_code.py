"""Code in a model's folder runs only where somebody asked for it: every call says so, whatever its default is."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from terakoya.components.tokenizer import load_tokenizer
from terakoya.errors import UserError

SOURCES = [Path(__file__).parents[2] / name for name in ("core", "plugins", "tools")]


def loading_calls(file: Path) -> Iterator[ast.Call]:
    """The calls of `from_pretrained` and of `Auto*.from_config`; torch's `nn.Embedding.from_pretrained` is neither."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).split(".")[-1]
            named = node.func.attr == "from_pretrained" and owner != "Embedding"
            if named or (node.func.attr == "from_config" and owner.startswith("Auto")):
                yield node


def test_every_call_says_whether_it_trusts_code() -> None:
    """Without the argument Transformers asks on the terminal, and `yes |` in a script answers."""
    silent, calls = [], 0
    for file in (file for folder in SOURCES for file in sorted(folder.rglob("*.py")) if ".venv" not in file.parts):
        for call in loading_calls(file):
            calls += 1
            if not any(keyword.arg == "trust_remote_code" for keyword in call.keywords):
                silent.append(f"{file}:{call.lineno}: {ast.unparse(call)}")
            values = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
            assert not any(isinstance(value, ast.Constant) and value.value for value in values), file
    assert calls > 15 and not silent, "\n".join(silent)


BROKEN = {
    "half a regex": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
    "merges of unknown pieces": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    "an id below zero": {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
    "junk for a character map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no model": {"model": None},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_an_error_in_words(name: str, tmp_path: Path) -> None:
    """tokenizers panics for some of these, with what is no Exception of Python's."""
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, **BROKEN[name]}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match=r"expected a tokenizer that Transformers loads; it says: .+"):
        load_tokenizer(tmp_path)

"""`terakoya tokenizer train`: flags, settings files and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import exit_code

TEXT = "庭の池に、赤い魚と白い魚がいる。\n\n魚は池の底で休む。\n" * 5


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def settings_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "terakoya.json").read_text())
    return record["settings"]


def test_file_set_and_flags_together(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"type": "mecab_wordpiece", "min_frequency": 3, "num_unused_tokens": 4}')
    out = tmp_path / "out"
    options = ["--set", "min_frequency=4", "--vocab-size", 55, "--do_lower_case", "--dictionary=ipadic"]
    assert exit_code("tokenizer", "train", corpus, "--out", out, "--settings", file, *options, "--processes", 1) == 0
    settings = settings_of(out)
    assert (settings["vocab_size"], settings["min_frequency"], settings["num_unused_tokens"]) == (55, 4, 4)
    assert settings["do_lower_case"] is True and settings["dictionary"] == "ipadic"


@pytest.mark.parametrize("name", ["settings.yaml", "settings.json"])
def test_the_settings_file_may_contain_the_corpus_and_the_folder(corpus: Path, tmp_path: Path, name: str) -> None:
    values = {"type": "mecab_wordpiece", "input": str(corpus), "output_dir": str(tmp_path / "deep")}
    file = tmp_path / name
    if name.endswith("yaml"):
        lines = [f"{key}: {value}" for key, value in values.items()]
        file.write_text("\n".join(["# where", *lines, "model_prefix: small", "vocab_size: 60  # pieces", ""]))
    else:
        file.write_text(json.dumps({**values, "model_prefix": "small", "vocab_size": 60}))
    assert exit_code("tokenizer", "train", "--settings", file, "--no-do-lower-case", "--processes", 1) == 0
    assert settings_of(tmp_path / "deep" / "small")["vocab_size"] == 60


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("vocab_size: 60\nvocab_size: 70\n", [], '.yaml:2:1: the key "vocab_size" is given twice, as 60 and as 70'),
        ('{"vocab_size": 60, "vocab_size": 70}', [], 'the key "vocab_size" is given twice, as 60 and as 70'),
        ("vocab_size: 60\n", ["--vocab-size", "70"], '"vocab_size" is given twice, as --vocab-size and in'),
        ("type: mecab_wordpiece\n", [], '"type" is given twice, as --type and in'),
        ("min_frequency: 2\n", ["--vocab-size", "70", "--vocab_size=80"], "--vocab_size=80: the option is given twice"),
        ("", ["--set", "vocab_size=6", "--set", "vocab_size=7"], "--set vocab_size: the key is given twice"),
        (
            "",
            ["--set", "vocab_size=6", "--vocab-size", "7"],
            '"vocab_size" is given twice, as --vocab-size and in --set',
        ),
        ("input: other.txt\n", [], "the corpus is given twice, as CORPUS and as input"),
        ("output_dir: there\n", [], "the new folder is given twice"),
        ("- a\n- b\n", [], "expected keys with values"),
        ("a: [1\n", [], "not valid YAML"),
        ("", ["--vocab-size"], "--vocab-size: expected a value after it"),
        ("", ["--vocab-sise", "5"], 'did you mean "vocab_size"'),
    ],
)
def test_repeated_settings_and_unreadable_files_are_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, options: list[str], message: str
) -> None:
    path = tmp_path / ("settings.json" if file.startswith("{") else "settings.yaml")
    path.write_text(file or "min_frequency: 2\n")
    given = ["--settings", path, "--type", "mecab_wordpiece", "--processes", 1]
    assert exit_code("tokenizer", "train", corpus, "--out", tmp_path / "out", *given, *options) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus.txt", "--type", "mecab_wordpiece"], "--out: expected"),
        (["--type", "mecab_wordpiece", "--out", "out"], "CORPUS: expected at least one file"),
    ],
)
def test_missing_arguments_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code("tokenizer", "train", *arguments) == 2
    assert message in capsys.readouterr().err

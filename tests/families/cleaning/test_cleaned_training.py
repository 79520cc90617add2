"""Cleaning steps of functions that learn from a corpus: a tokenizer does not learn from held-out documents."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from terakoya.commands.main import main
from terakoya.errors import UserError
from terakoya.tokenization.train import train_tokenizer
from terakoya_cleaning.steps import HoldOut
from terakoya_corpus.count_words import save_word_counts

TEXTS = [f"w{n} w{n}" for n in range(200)]
STEPS: list[dict[str, Any]] = [{"type": "exact_duplicates"}, {"type": "hold_out", "share": 0.3}]
SETTINGS = {"type": "byte_bpe", "vocab_size": 400, "min_frequency": 2}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2))
    (tmp_path / "clean.json").write_text(json.dumps(STEPS))
    return file


def _held_out() -> set[str]:
    step = HoldOut(share=0.3)
    return {text for text in TEXTS if step.holds_out(text)}


def _train(corpus: Path, out: str, **options: Any) -> bytes:
    options = {"clean": corpus.with_name("clean.json"), "processes": 1, **options}
    settings = {**SETTINGS, **options.pop("settings", {})}
    train_tokenizer([corpus], corpus.with_name(out), settings=settings, **options)
    return corpus.with_name(out).joinpath("tokenizer.json").read_bytes()


def test_words_of_held_out_documents_are_not_counted(corpus: Path, tmp_path: Path) -> None:
    table = save_word_counts(
        [corpus], tmp_path / "table", settings=SETTINGS, clean=tmp_path / "clean.json", processes=1
    )
    held_out = _held_out()
    assert 30 < len(held_out) < 90
    assert table.documents == len(TEXTS) - len(held_out)
    words = {word.strip("Ġ ") for word in table.counts}
    assert not words & {text.split()[0] for text in held_out}
    assert (tmp_path / "table.clean" / "plan.json").exists()


def test_a_tokenizer_is_that_of_the_kept_documents(corpus: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    held_out = _held_out()
    kept.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS if text not in held_out))
    cleaned = _train(corpus, "cleaned")
    train_tokenizer([kept], tmp_path / "plain", settings={"type": "byte_bpe", "vocab_size": 400}, processes=1)
    assert cleaned == (tmp_path / "plain" / "tokenizer.json").read_bytes()
    assert cleaned == _train(corpus, "steps", clean=STEPS, clean_folder=tmp_path / "shared", processes=2)


def test_a_table_is_accepted_only_with_the_same_steps(corpus: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    save_word_counts([corpus], tmp_path / "table", settings=SETTINGS, clean=STEPS, clean_folder=shared, processes=1)
    settings = {"counts": str(tmp_path / "table")}
    assert _train(corpus, "kept", settings=settings) == _train(corpus, "counted")
    with pytest.raises(UserError, match=r"table: corpus: cleaning: expected none"):
        _train(corpus, "other", settings=settings, clean=None)
    with pytest.raises(UserError, match=r'table: corpus: cleaning: expected .*"share": 0\.2'):
        _train(corpus, "other", settings=settings, clean=[{"type": "hold_out", "share": 0.2}])


def test_the_next_commands_read_the_same_text_and_clean_it_no_more(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus.write_text(corpus.read_text().replace('"text"', '"body"'))
    read = [corpus, "--clean", corpus.with_name("clean.json"), "--field", "body", "--processes", 1]
    following = list(map(str, ["tokenizer", "count", *read, "--type", "byte_bpe", "--out", tmp_path / "words"]))
    for verb in ("tokenizer count", "tokenizer train", "prepare", "train"):
        assert " ".join(following).startswith(verb + " ")
        if verb != "train":
            with pytest.raises(SystemExit) as left:
                main(following)
            said = capsys.readouterr().err
            assert not left.value.code, said
            following = shlex.split(said.partition("next: terakoya ")[2])
    assert [each.name for each in tmp_path.glob("*.clean")] == ["words.clean"]
    plan = ["clean", corpus, "--clean", corpus.with_name("clean.json"), "--field", "body", "--out", tmp_path / "plan"]
    for shard in (["--shard", "1/2"], []):
        with pytest.raises(SystemExit):
            main(list(map(str, [*plan, *shard])))
        assert "--field body" in capsys.readouterr().err.partition("next: terakoya ")[2]


def test_wrong_options_are_found_before_anything_is_cleaned(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.json: no such file"):
        _train(corpus, "out", clean=tmp_path / "no.json")
    with pytest.raises(UserError, match="--clean-folder: expected --clean as well"):
        _train(corpus, "out", clean=None, clean_folder=tmp_path / "folder")
    with pytest.raises(UserError, match="vocab_sice"):
        _train(corpus, "out", settings={"vocab_sice": 3})
    _train(corpus, "there")
    with pytest.raises(UserError, match="expected a new or empty folder"):
        _train(corpus, "there", clean_folder=tmp_path / "folder")
    assert not (tmp_path / "out.clean").exists()
    assert not (tmp_path / "folder").exists()

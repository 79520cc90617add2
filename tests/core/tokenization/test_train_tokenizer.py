"""Tokenizers trained and imported from Python: the folder is complete or missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.plugins import loading as plugins
from terakoya.tokenization.import_model import import_tokenizer
from terakoya.tokenization.recognise import load_decoder, recognise_tokenizer
from terakoya.tokenization.train import train_tokenizer
from terakoya_contract.commands.new import TEMPLATES
from terakoya_plugins.tokenizers.huggingface import HuggingFace
from terakoya_plugins.tokenizers.mecab_wordpiece import MecabWordPiece

TEXT = "庭の池に、赤い魚と白い魚がいる。\n\n魚は池の底で休む。\n" * 5


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_a_folder_with_files_is_not_changed(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    with pytest.raises(UserError, match="expected a new or empty folder"):
        train_tokenizer([corpus], out, settings={"type": "mecab_wordpiece"}, processes=1)
    assert (out / "mine").read_text() == "keep"


def test_a_failure_half_way_leaves_no_folder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(
        self: MecabWordPiece,
        corpus: Corpus,
        folder: Path,
        *,
        processes: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, Any]:
        (folder / "vocab.txt").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(MecabWordPiece, "train", fail)
    with pytest.raises(OSError, match="disk full"):
        train_tokenizer([corpus], tmp_path / "out", settings={"type": "mecab_wordpiece"}, processes=1)
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.txt"]


def test_files_and_a_corpus_of_them_give_the_same_tokenizer(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    settings = {"type": "mecab_wordpiece", "vocab_size": 60}
    lines = Corpus([corpus], documents="line")
    facts = train_tokenizer([str(corpus)], tmp_path / "files", settings=settings, documents="line", processes=1)
    assert facts == train_tokenizer(lines, tmp_path / "corpus", settings=settings, processes=2)
    assert facts["documents"] == 10
    assert MecabWordPiece.from_folder(tmp_path / "files") is not None
    for file in (tmp_path / "files").iterdir():
        assert file.read_bytes() == (tmp_path / "corpus" / file.name).read_bytes()


def test_a_corpus_keeps_its_own_options(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a Corpus has its own"):
        train_tokenizer(Corpus([corpus]), tmp_path / "out", settings={"type": "byte_bpe"}, documents="line")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        (
            "tokenizer.json",
            "put tokenizer.json, unpacked, into a folder of its own as tokenizer.json, and use that folder",
        ),
        ("other.json.gz", "put other.json.gz, unpacked, into a folder of its own as tokenizer.json, and use that"),
        ("folder", "a tokenizer of Transformers is used as it is, by its folder"),
    ],
)
def test_a_ready_tokenizer_is_not_imported(file: str, advice: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=advice):
        import_tokenizer(Path(file), tmp_path / "out", settings={"type": "huggingface"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["mecab_wordpiece", "mecab_character", "byte_bpe", "sentencepiece"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected at least one document, got an empty corpus"),
        ("한국어 문장.".encode("euc-kr"), "got 1 of 1 documents (1 bad encoding), the first in .*line 1: .*\n.*iconv"),
        (b'{\n"text": "a"\n}\n', "got 3 of 3 documents (3 bad JSON), the first in .*line 1: {\n.*write one JSON"),
        (b'{"content": "a"}\n', "got 1 of 1 documents (1 missing field), .*\n.*--field"),
    ],
    ids=["empty", "euc-kr", "pretty", "other key"],
)  # fmt: skip
def test_a_corpus_without_a_document_makes_no_tokenizer(tmp_path: Path, kind: str, content: bytes, said: str) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(content)
    with pytest.raises(UserError) as caught:
        train_tokenizer([corpus], tmp_path / "out", settings={"type": kind}, processes=1)
    pattern = ".*" + said.replace("(", r"\(").replace(")", r"\)")
    assert re.match(pattern, str(caught.value), re.DOTALL) and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fresh_plugins")
def test_a_tokenizer_of_a_plugin_is_not_read_as_another_kind_without_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin that writes no record of its own: its folder names its kind all the same."""
    source = (TEMPLATES / "tokenizer.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(source.replace('"example"', '"mine"'), encoding="utf-8")
    plugins.load([str(tmp_path / "mine.py")])
    out = tmp_path / "out"
    train_tokenizer([corpus], out, settings={"type": "mine", "vocab_size": 40}, processes=1)
    assert json.loads((out / "terakoya.json").read_text())["settings"] == {"vocab_size": 40}
    assert type(recognise_tokenizer(out)).__module__ != HuggingFace.__module__
    text = recognise_tokenizer(out).load(out).decode([8, 9])
    monkeypatch.setattr(plugins, "_current", None)
    monkeypatch.setenv(plugins.PLUGINS_VARIABLE, "")
    with pytest.raises(UserError, match=r"tokenizer type mine, which made it, is missing: load its plugin .*--plugin"):
        recognise_tokenizer(out)
    assert isinstance(recognise_tokenizer(out, type="huggingface"), HuggingFace)
    decoder = load_decoder(out)  # ids become text without the plugin
    assert "type mine, which made it, is missing: Transformers alone" in caplog.text
    assert decoder.decode([8, 9]) == text and "[UNK]" not in text

"""The tokenizer `example` meets the requirements of its kind, and splits text into characters."""

from pathlib import Path

from terakoya import plugins
from terakoya.corpus.corpus import Corpus
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_a_tokenizer() -> None:
    assert problems(PLUGIN) == []


def test_it_splits_text_into_characters(tmp_path: Path) -> None:
    tokenizer = plugins.load([str(PLUGIN)]).component("tokenizers", "example")()
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("いろはにほへと ちりぬるを", encoding="utf-8")
    tokenizer.train(Corpus([corpus]), tmp_path / "trained")
    assert tokenizer.load(tmp_path / "trained").tokenize("いろは ん") == ["い", "ろ", "は", "[UNK]"]

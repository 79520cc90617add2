"""The initializer `example` meets the requirements of its kind, and uses the first characters alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from terakoya import plugins
from terakoya.components import VocabularyChange
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def tokenizer(pieces: str) -> Any:
    """A stand-in for a tokenizer of single characters and whole words."""
    ids = {piece: id for id, piece in enumerate(pieces.split())}
    return SimpleNamespace(
        get_vocab=lambda: ids, added_tokens_decoder={}, all_special_ids=[], tokenize=list,
        convert_tokens_to_ids=lambda tokens: [ids[token] for token in tokens],
    )  # fmt: skip


def test_it_meets_the_requirements_of_an_initializer() -> None:
    assert problems(PLUGIN) == []


def test_the_first_characters_count() -> None:
    initializer = plugins.load([str(PLUGIN)]).component("initializers", "example")(characters=2)
    change = VocabularyChange(old=tokenizer("a b c"), new=tokenizer("a b c abc"), kept={0: 0, 1: 1, 2: 2}, missing=[3])
    assert initializer.weights(change) == [{0: 0.5, 1: 0.5}]

"""The word finder `example` meets the requirements of its kind, and finds the expected words."""

from pathlib import Path

from terakoya import plugins
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_a_word_finder() -> None:
    assert problems(PLUGIN) == []


def test_words_end_at_white_space_and_after_hyphens() -> None:
    finder = plugins.load([str(PLUGIN)]).component("word_finders", "example")()
    text = "well-known  words"
    assert [text[start:stop] for start, stop in finder.build()([text])[0]] == ["well-", "known", "words"]

"""The cleaning step `example` meets the requirements of its kind, and decides as expected."""

from pathlib import Path

from terakoya import plugins
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_a_cleaning_step() -> None:
    assert problems(PLUGIN) == []


def test_it_changes_tabs_and_drops_documents_of_few_characters() -> None:
    step = plugins.load([str(PLUGIN)]).component("cleaning_steps", "example")()
    assert step.change("a\tb") == "a b"
    assert [text for text in ("aab", "abc") if step.keeps(text)] == ["abc"]

"""What the steps drop of 200 documents that we wrote and labelled, and that the page of the filters tells the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from terakoya.components import CleaningStep
from terakoya_filters import register_cleaning_steps

LINES = (Path(__file__).parent / "labelled.jsonl").read_text(encoding="utf-8").strip().split("\n")
DOCUMENTS = list(map(json.loads, LINES))
GOOD = frozenset(
    ("prose", "dialogue", "verse", "table", "list_of_sentences", "technical", "formal", "colloquial", "classical")
)
SETTINGS: Mapping[str, Mapping] = {"markup": {"action": "drop"}}
MEANT_FOR = {
    "language": ("chinese", "korean", "english"),
    "repetition": ("repeated_lines", "repeated_words"),
    "boilerplate": ("menu", "cookie", "code"),
    "lines": ("menu",),
    "kana": ("keywords",),
    "markup": ("html",),
}
PAGE = Path(__file__).parents[3] / "docs/how-to"


def step_of(name: str) -> CleaningStep:
    return register_cleaning_steps()[name].model_validate(SETTINGS.get(name, {}))


def dropped_by(name: str) -> list[bool]:
    """Whether the step drops each document."""
    step = step_of(name)
    return [not step.keeps(step.change(each["text"])) for each in DOCUMENTS]


def figures(name: str) -> tuple[int, int, int, int]:
    """How many documents a step drops, how many of them are bad, how many are of its kinds, and dropped of these."""
    kinds = [each["kind"] for each in DOCUMENTS]
    dropped = [kind for kind, gone in zip(kinds, dropped_by(name), strict=True) if gone]
    meant = MEANT_FOR[name]
    return (
        len(dropped),
        sum(kind not in GOOD for kind in dropped),
        sum(kind in meant for kind in kinds),
        sum(kind in meant for kind in dropped),
    )


def test_there_are_two_hundred_documents_of_many_kinds() -> None:
    assert len(DOCUMENTS) == 200
    assert len({each["text"] for each in DOCUMENTS}) == 200
    assert {kind for kinds in MEANT_FOR.values() for kind in kinds} | GOOD <= {each["kind"] for each in DOCUMENTS}


@pytest.mark.parametrize("name", MEANT_FOR)
def test_precision_and_recall_are_those_of_the_page(name: str) -> None:
    dropped, bad, meant, found = figures(name)
    row = f"| `{name}` | {bad / dropped:.2f} | {found / meant:.2f} |"
    for page in ("filters.md", "filters.ja.md"):
        assert row in re.sub(r" +", " ", (PAGE / page).read_text(encoding="utf-8"))


def test_all_steps_together_drop_most_bad_documents_and_few_good_ones() -> None:
    gone = [any(each) for each in zip(*map(dropped_by, MEANT_FOR), strict=True)]
    good = [each["kind"] in GOOD for each in DOCUMENTS]
    dropped_good = sum(is_gone and is_good for is_gone, is_good in zip(gone, good, strict=True))
    dropped_bad = sum(gone) - dropped_good
    assert dropped_good <= 6
    assert dropped_bad >= 0.98 * (len(good) - sum(good))

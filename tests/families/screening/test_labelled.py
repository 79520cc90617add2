"""What the steps find among 200 documents that were written and labelled for this, all of them invented.

A label is a kind and its place in the text, a word of `words.txt`, or text of `test_set.jsonl`. Phone numbers have an
exchange of zeros, which no network has; cards are those that payment services publish for tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya_screening.personal_data import KINDS, find_personal_data
from terakoya_screening.steps import Decontaminate, Words

HERE = Path(__file__).parent
DOCUMENTS: list[dict[str, Any]] = [
    json.loads(line) for line in (HERE / "labelled.jsonl").read_text(encoding="utf-8").splitlines()
]
MEASURED = {
    "mail": (15, 1.0, 1.0),
    "phone": (39, 1.0, 1.0),
    "postal_code": (6, 1.0, 1.0),
    "address": (20, 1.0, 0.95),
    "my_number": (6, 0.86, 1.0),
    "card_number": (8, 1.0, 1.0),
    "words": (16, 0.89, 1.0),
    "test_set": (14, 1.0, 0.79),
}
"""Number of labels, precision and recall, as docs/how-to/personal-data.md has them."""


def found_and_labels(kind: str) -> tuple[set[Any], set[Any]]:
    texts = [each["text"] for each in DOCUMENTS]
    if kind in KINDS:
        found = {
            (number, each.start, each.end)
            for number, text in enumerate(texts)
            for each in find_personal_data(text, frozenset(KINDS))
            if each.kind == kind
        }
        spans = ((number, *span) for number, each in enumerate(DOCUMENTS) for span in each["personal"])
        return found, {(number, start, end) for number, label, start, end in spans if label == kind}
    step = Words(file=HERE / "words.txt") if kind == "words" else Decontaminate(files=(HERE / "test_set.jsonl",))
    dropped = {number for number, text in enumerate(texts) if not step.keeps(text)}
    return dropped, {number for number, each in enumerate(DOCUMENTS) if each[kind]}


@pytest.mark.parametrize("kind", MEASURED)
def test_precision_and_recall_are_those_that_the_documentation_tells(kind: str) -> None:
    found, labels = found_and_labels(kind)
    hits = len(found & labels)
    assert (len(labels), round(hits / len(found), 2), round(hits / len(labels), 2)) == MEASURED[kind]
    assert len(DOCUMENTS) == 200

"""What the steps find among 200 documents that were written and labelled for this, all of them invented.

A label is a kind and its place in the text, a word of `words.txt`, or text of `test_set.jsonl`. Phone numbers have an
exchange of zeros, which no network has; cards are those that payment services publish for tests.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from terakoya_screening.personal_data import KINDS, find_personal_data
from terakoya_screening.steps import Decontaminate, PersonalData, Words

HERE = Path(__file__).parent


def documents() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "labelled.jsonl").read_text(encoding="utf-8").splitlines()]


def precision_and_recall(found: set[Any], labels: set[Any]) -> tuple[float, float]:
    hits = len(found & labels)
    return round(hits / len(found), 2), round(hits / len(labels), 2)


def main() -> None:
    docs = documents()
    labels = {(n, *span) for n, doc in enumerate(docs) for span in doc["personal"]}
    found = {(n, f.kind, f.start, f.end) for n, doc in enumerate(docs) for f in find_personal_data(doc["text"], frozenset(KINDS))}
    for kind in KINDS:
        l, f = ({e for e in s if e[1] == kind} for s in (labels, found))
        print(kind, len(l), len(f), precision_and_recall(f, l))
        for e in sorted(f ^ l):
            print("   ", "missed" if e in l else "false", docs[e[0]]["text"][e[2]:e[3]], "|", docs[e[0]]["text"])
    for key, step in {"words": Words(file=HERE / "words.txt"), "test_set": Decontaminate(files=(HERE / "test_set.jsonl",))}.items():
        l = {n for n, doc in enumerate(docs) if doc[key]}
        f = {n for n, doc in enumerate(docs) if not step.keeps(doc["text"])}
        print(key, len(l), len(f), precision_and_recall(f, l))
        for e in sorted(f ^ l):
            print("   ", "missed" if e in l else "false", step.why(docs[e]["text"]), docs[e]["text"])


if __name__ == "__main__":
    main()

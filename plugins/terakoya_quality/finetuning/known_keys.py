"""Keys of labelled examples in other programs' formats: which are read, which mean nothing, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping

from terakoya.corpus.documents import Reason
from terakoya.corpus.known_keys import NOTHING, TWO_FORMS, KnownKeys

_WEIGHT: Reason = "an example that counts otherwise"
_ONE = {key: NOTHING - {"false"} | {"1", "1.0", "true"} for key in ("weight", "sample_weight", "train")}
_EXAMPLE: Mapping[str, Reason] = {"weight sample_weight train": _WEIGHT}

KNOWN: Mapping[str, KnownKeys] = {
    "text": KnownKeys("text label", _EXAMPLE, defaults=_ONE),
    "pair": KnownKeys("text1 text2 label", _EXAMPLE, defaults=_ONE),
    "choice": KnownKeys(
        r"question choices choice\d+ label", {**_EXAMPLE, "context passage article": "a text to a question"},
        defaults=_ONE,
    ),
    "tagged words": KnownKeys("tokens tags", {**_EXAMPLE, "spans": TWO_FORMS}, "text", defaults=_ONE),
    "spans": KnownKeys("text spans", {**_EXAMPLE, "tags": TWO_FORMS}, defaults=_ONE),
    "span": KnownKeys("span start end label type text name", one_of=("span start", "label type", "text name")),
    "asked text": KnownKeys(
        "question context answers", {**_EXAMPLE, "is_impossible": "a question without an answer"}, "plausible_answers",
        defaults=_ONE,
    ),
    "answer": KnownKeys("text answer_start"),
}  # fmt: skip
"""Kind of object -> its keys. `span` is a part of `spans`."""

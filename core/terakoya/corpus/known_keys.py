"""Keys of other programs' formats: which a reader reads, which mean nothing to training, and which it refuses.

A key that would change what is trained is honoured by its reader, or refused here. One that nobody here knows is told
with a count. A new format, or a key of one, is a line in `KNOWN`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from terakoya.corpus.documents import Reason

HARMLESS = (
    "id idx index uuid guid hash source dataset lang language url title category topic domain license meta metadata "
    "created created_at timestamp date author model score quality"
)
"""Keys, with spaces between them, that describe an example and mean nothing to training, in any format."""
LEARNED_FLAGS = ("weight", "train", "training", "loss")
"""Keys of a message that is learned where they are 1 or true, and only read where they are 0 or false: `weight` in
OpenAI's and Mistral's files, `train` and `training` in axolotl's, `loss` in XTuner's and SWIFT's."""
NOTHING = frozenset({"", "none", "null", "nan", "[]", "{}", "false"})
"""Values that say nothing, as text in lower case."""


class RefusedKeyError(Exception):
    """An object has a key that would change what is trained, and that its reader does not read."""

    def __init__(self, key: str, reason: Reason) -> None:
        super().__init__(f"{key}: {reason}")
        self.key, self.reason = key, reason


@dataclass(frozen=True)
class KnownKeys:
    """The keys of one kind of object.

    Attributes:
        read: the keys that the reader reads, patterns with spaces between them.
        refused: keys with spaces between them -> what they hold.
        harmless: keys that mean nothing here, besides `HARMLESS`.
        one_of: keys with spaces between them, of which one at most may hold something.
        defaults: what a refused key may hold, where that is not `NOTHING`.
    """

    read: str
    refused: Mapping[str, Reason] = field(default_factory=dict)
    harmless: str = ""
    one_of: tuple[str, ...] = ()
    defaults: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def refused_keys(self) -> dict[str, Reason]:
        """Each refused key -> what it holds."""
        return {key: reason for keys, reason in self.refused.items() for key in keys.split()}

    @cached_property
    def _quiet(self) -> re.Pattern[str]:
        return re.compile("|".join(f"{self.read} {self.harmless} {HARMLESS}".split()))

    def unread(self, value: Mapping[str, Any]) -> list[str]:
        """Returns the keys of `value` that hold something and that nobody here knows. Raises RefusedKeyError."""
        found = []
        for key in value:
            reason = self.refused_keys.get(key)
            if reason is None and self._quiet.fullmatch(key):
                continue
            if not _is_in(value[key], self.defaults.get(key, NOTHING)):
                if reason is not None:
                    raise RefusedKeyError(key, reason)
                found.append(key)
        for keys in self.one_of:
            held = [key for key in keys.split() if not _is_in(value.get(key), NOTHING)]
            if len(held) > 1:
                raise RefusedKeyError(held[1], _TWO_FORMS)
        return found


def _is_in(value: Any, texts: Collection[str]) -> bool:
    return str(value).strip().lower() in texts


_TWO_FORMS: Reason = "two forms of one example"
_WEIGHT: Reason = "an example that counts otherwise"
_NOT_TEXT: Mapping[str, Reason] = {
    "tools functions tool_calls function_call": "tools and their calls",
    "reasoning reasoning_content thinking": "reasoning beside the answer",
    "image images video videos audio audios": "images, video or sound",
    "chosen rejected kto_tag": "preferred and rejected answers",
}
_FLAGS = " ".join(LEARNED_FLAGS)
_ONE = {key: NOTHING - {"false"} | {"1", "1.0", "true"} for key in ("weight", "sample_weight", "train")}
_MESSAGE: Mapping[str, Reason] = {**_NOT_TEXT, "train_detail loss_scale": "weight is not 0 or 1"}
_LINE: Mapping[str, Reason] = {**_MESSAGE, "weight train": _WEIGHT, "history input output response": _TWO_FORMS}
_EXAMPLE: Mapping[str, Reason] = {"weight sample_weight train": _WEIGHT}

KNOWN: Mapping[str, KnownKeys] = {
    "messages": KnownKeys(
        "messages system", {**_LINE, "conversations instruction": _TWO_FORMS}, "prompt prompt_id", defaults=_ONE
    ),
    "conversations": KnownKeys("conversations system", {**_LINE, "messages instruction": _TWO_FORMS}, defaults=_ONE),
    "instruction": KnownKeys(
        f"instruction input context output response system history {_FLAGS}", _NOT_TEXT, "text",
        one_of=("input context", "output response"),
    ),
    "message": KnownKeys(f"role content {_FLAGS}", _MESSAGE),
    "turn": KnownKeys(f"from value {_FLAGS}", _MESSAGE),
    "text": KnownKeys("text label", _EXAMPLE, defaults=_ONE),
    "pair": KnownKeys("text1 text2 label", _EXAMPLE, defaults=_ONE),
    "choice": KnownKeys(
        r"question choices choice\d+ label", {**_EXAMPLE, "context passage article": "a text to a question"},
        defaults=_ONE,
    ),
    "tagged words": KnownKeys("tokens tags", {**_EXAMPLE, "spans": _TWO_FORMS}, "text", defaults=_ONE),
    "spans": KnownKeys("text spans", {**_EXAMPLE, "tags": _TWO_FORMS}, defaults=_ONE),
    "span": KnownKeys("span start end label type text name", one_of=("span start", "label type", "text name")),
    "asked text": KnownKeys(
        "question context answers", {**_EXAMPLE, "is_impossible": "a question without an answer"}, "plausible_answers",
        defaults=_ONE,
    ),
    "answer": KnownKeys("text answer_start"),
}  # fmt: skip
"""Kind of object -> its keys. `message` and `turn` are parts of `messages` and `conversations`, `span` of `spans`."""

"""Cleaning steps: each changes documents, drops some of them, or holds some out. They are read from a JSON list."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from terakoya_cleaning.sentences import split_sentences
from terakoya.errors import UserError, nearest
from terakoya.json_settings import NOTES, explain, read_value, short_json

VERSION = 1
"""Raise this number when a step changes its meaning, so that earlier cleanings are done again."""

StepsOrFile = Path | Sequence[Mapping[str, Any]]
"""Cleaning steps as JSON values, or a JSON or YAML file with a list of them."""

_CHARACTERS = {
    "japanese": re.compile(
        r"[\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
        r"\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
    ),
    "kana": re.compile(r"[\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f]"),
    "kanji": re.compile(r"[\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "latin": re.compile(r"[A-Za-z\u00c0-\u024f\uff21-\uff3a\uff41-\uff5a]"),
    "digits": re.compile(r"[0-9\uff10-\uff19]"),
}


class _Step(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def change(self, text: str) -> str:
        """Returns the changed text of a document."""
        return text

    def keeps(self, text: str) -> bool:
        """Whether a document stays, as far as its own text decides."""
        return True


class Nfkc(_Step):
    """Applies Unicode normalisation form NFKC: full-width letters and half-width kana become the usual ones."""

    type: Literal["nfkc"]
    """The name of the step."""

    def change(self, text: str) -> str:
        return unicodedata.normalize("NFKC", text)


class Sentences(_Step):
    """Puts each sentence on a line of its own."""

    type: Literal["sentences"]
    """The name of the step."""

    def change(self, text: str) -> str:
        return split_sentences(text)


class Length(_Step):
    """Drops documents with fewer or more characters than the limits."""

    type: Literal["length"]
    """The name of the step."""
    min_characters: int = Field(default=0, ge=0)
    """The shortest document that stays. Unit: characters."""
    max_characters: int | None = Field(default=None, ge=1)
    """The longest document that stays; null is no limit. Unit: characters."""

    def keeps(self, text: str) -> bool:
        return self.min_characters <= len(text) and (self.max_characters is None or len(text) <= self.max_characters)


class Characters(_Step):
    """Drops documents by the share of one kind of character among the characters that are not white space."""

    type: Literal["characters"]
    """The name of the step."""
    of: Literal["japanese", "kana", "kanji", "latin", "digits"]
    """The kind of character that is counted."""
    min_share: float = Field(default=0.0, ge=0, le=1)
    """The smallest share with which a document stays, from 0 to 1."""
    max_share: float = Field(default=1.0, ge=0, le=1)
    """The largest share with which a document stays, from 0 to 1."""

    def keeps(self, text: str) -> bool:
        matching = len(text) - len(_CHARACTERS[self.of].sub("", text))
        total = len("".join(text.split()))
        return self.min_share * total <= matching <= self.max_share * total


class ExactDuplicates(_Step):
    """Keeps only the first document of each text."""

    type: Literal["exact_duplicates"]
    """The name of the step."""


class NearDuplicates(_Step):
    """Keeps only the first of documents with similar sets of character n-grams, as estimated by MinHash."""

    type: Literal["near_duplicates"]
    """The name of the step."""
    threshold: float = Field(default=0.8, ge=0.2, le=0.95)
    """The estimated Jaccard similarity from which two documents count as the same, from 0 to 1."""
    permutations: int = Field(default=128, ge=16, le=1024)
    """Number of hash functions of a signature: more give a better estimate, and need more memory and time."""
    characters: int = Field(default=5, ge=1)
    """The length of the n-grams. Unit: characters."""


class HoldOut(_Step):
    """Holds out a share of the documents for validation, chosen by a hash of their text, so that equal texts are either
    all held out or all kept."""

    type: Literal["hold_out"]
    """The name of the step."""
    share: float = Field(gt=0, lt=1)
    """The share of the documents that is held out, between 0 and 1."""
    seed: int = 0
    """The seed of the hash: another seed holds other documents out."""

    def holds_out(self, text: str) -> bool:
        """Whether the document with this text is held out."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(self.seed).encode()).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64


Step = Nfkc | Sentences | Length | Characters | ExactDuplicates | NearDuplicates | HoldOut
TYPES: Mapping[str, type[Step]] = {
    "nfkc": Nfkc,
    "sentences": Sentences,
    "length": Length,
    "characters": Characters,
    "exact_duplicates": ExactDuplicates,
    "near_duplicates": NearDuplicates,
    "hold_out": HoldOut,
}


def parse_steps(value: Any, *, source: str) -> tuple[Step, ...]:
    """Returns the steps of the JSON value `value`, a list of objects that each have a `type`.

    `source` names the list in error messages: its file, or its key such as `clean` or `pipeline: corpora.wiki.clean`.

    Raises UserError with one line for each problem; each line begins with `source`.
    """
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{source}: expected a list of one cleaning step or more, got {short_json(value)}")
    prefix = f"{source}." if source.endswith("clean") else f"{source}: "
    steps: list[Step] = []
    problems: list[str] = []
    for number, settings in enumerate(value):
        kind = settings.get("type") if isinstance(settings, Mapping) else None
        if not isinstance(kind, str) or kind not in TYPES:
            raise UserError(
                f"{prefix}{number}.type: expected one of {', '.join(TYPES)}, got {short_json(kind)}"
                + (nearest(kind, TYPES) if isinstance(kind, str) else "")
            )
        try:
            steps.append(TYPES[kind].model_validate(settings))
        except ValidationError as error:
            problems += explain(error, TYPES[kind], str(number))
    if problems:
        raise UserError("\n".join(prefix + problem for problem in problems))
    types = [step.type for step in steps]
    if repeated := sorted({kind for kind in types if types.count(kind) > 1 and kind != "characters"}):
        raise UserError(f"{source}: {', '.join(repeated)}: expected once, got it twice")
    if "hold_out" in types[:-1]:
        raise UserError(f"{source}: hold_out: expected as the last step, so that held-out documents are clean too")
    return tuple(steps)


def load_steps(clean: StepsOrFile | None) -> tuple[Step, ...]:
    """Returns the steps of `clean`: a list, or a file with a list or with an object {"clean": list}, which
    has a place for "$schema"; none if it is None.

    Raises UserError for a missing file and for invalid steps, each by its number.
    """
    if clean is None:
        return ()
    if not isinstance(clean, Path):
        return parse_steps(list(clean), source="clean")
    value = read_value(clean)
    if isinstance(value, Mapping) and "clean" in value and not value.keys() - {"clean", *NOTES}:
        return parse_steps(value["clean"], source=f"{clean.name}: clean")
    return parse_steps(value, source=clean.name)


def apply_steps(steps: Iterable[Step], text: str) -> str:
    """Returns `text` after all of `steps`."""
    for step in steps:
        text = step.change(text)
    return text

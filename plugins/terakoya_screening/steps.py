"""The cleaning steps of this family."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from terakoya.components import CleaningStep
from terakoya.errors import UserError
from terakoya.folder_kinds import missing_file
from terakoya_screening.personal_data import KINDS, Kind, find_personal_data
from terakoya_screening.test_sets import TestSets, find_sets, read_sets
from terakoya_screening.word_list import WordList, read_word_list

_EXAMPLES = Path(__file__).with_name("examples")


class PersonalData(CleaningStep):
    """Masks personal data, or drops documents that have some: mail addresses, Japanese phone numbers, postal codes and
    addresses, My Numbers and card numbers. What is found is counted by kind, and shown nowhere."""

    action: Literal["mask", "drop"] = "mask"
    """`mask` writes a placeholder in the place of each, such as [PHONE]; `drop` drops the document."""
    kinds: tuple[Kind, ...] = Field(default=KINDS, min_length=1)
    """What is looked for."""

    @cached_property
    def _kinds(self) -> frozenset[Kind]:
        return frozenset(self.kinds)

    def change(self, text: str) -> str:
        return self.show(text) if self.action == "mask" else text

    def keeps(self, text: str) -> bool:
        return self.action == "mask" or not find_personal_data(text, self._kinds)

    def why(self, text: str) -> str:
        return ", ".join(f"{kind} {count:,}" for kind, count in self.count(text).items())

    def count(self, text: str) -> Mapping[str, int]:
        return Counter(found.kind for found in find_personal_data(text, self._kinds))

    def show(self, excerpt: str) -> str:
        pieces, end = [], 0
        for found in find_personal_data(excerpt, self._kinds):
            pieces += [excerpt[end : found.start], f"[{found.kind.upper()}]"]
            end = found.end
        return "".join([*pieces, excerpt[end:]])


class Words(CleaningStep):
    """Drops documents with words of a list, which are found whatever their width and case. The hash of the file is a
    part of the settings: with another list, the plan is made again."""

    repeats: ClassVar = True
    test_settings: ClassVar[Mapping[str, Any]] = {"file": str(_EXAMPLES / "words.txt")}

    file: Path
    """The list: one word a line; lines that begin with # mean nothing. A line with ! before the word is an exception: a
    longer word that holds one of the list and is none, such as !ばかり to ばか."""
    least: int = Field(default=1, ge=1)
    """The number of words in a document from which it is dropped."""
    least_share: float = Field(default=0.0, ge=0, le=1)
    """The share of its characters without white space that the words must have, too, from 0 to 1."""

    @property
    def reason(self) -> str:
        """The name of the list."""
        return self.file.name

    def versions(self) -> Mapping[str, str]:
        return _hashes([self.file])

    def keeps(self, text: str) -> bool:
        found = self._list.find(text)
        if len(found) < self.least:
            return True
        return sum(map(len, found)) < self.least_share * len("".join(text.split()))

    def why(self, text: str) -> str:
        return f"words {len(self._list.find(text)):,}"

    @cached_property
    def _list(self) -> WordList:
        return read_word_list(self.file)


class Decontaminate(CleaningStep):
    """Drops documents that have text of test sets: so many letters in a row in Japanese, so many words otherwise, or
    the whole of a shorter text. Width, case, spaces and punctuation do not matter."""

    repeats: ClassVar = True
    test_settings: ClassVar[Mapping[str, Any]] = {"files": [str(_EXAMPLES / "test_set.jsonl")]}

    files: tuple[Path, ...] = ()
    """Test sets: jsonl, json, csv, tsv, parquet, all texts of their examples; txt, their lines."""
    tasks: tuple[str, ...] = ()
    """Suites or tasks such as jglue or jnli, as in `terakoya evaluate --tasks`: their evaluation and test sets."""
    data: Path | None = None
    """The folder with the files of `tasks`, as they are published."""
    characters: int = Field(default=25, ge=13, le=250)
    """How long a piece of a test set in Japanese is that a document may not have; of a shorter text all of it, from 13
    on. Unit: letters and digits."""
    words: int = Field(default=13, ge=8, le=250)
    """The same in other languages; of a shorter text all of it, from 8 on. Unit: words."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.files or self.tasks):
            raise ValueError("expected test sets, in files or tasks")
        return self

    def versions(self) -> Mapping[str, str]:
        sets = find_sets(self.files, self.tasks, self.data, tell=True)
        return _hashes(file for files in sets.values() for file in files)

    def keeps(self, text: str) -> bool:
        return not self._sets.find(text)

    def why(self, text: str) -> str:
        return "text of " + ", ".join(f"{name} {count:,}" for name, count in self._sets.find(text).items())

    @cached_property
    def _sets(self) -> TestSets:
        return read_sets(self.files, self.tasks, self.data, characters=self.characters, words=self.words)


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    hashes = {}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: {missing_file(file)}")
        with file.open("rb") as stream:
            hashes[f"sha256 of {file}"] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes

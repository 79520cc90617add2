"""The bundled cleaning steps: each changes documents, drops some of them, or holds some out."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from terakoya.components import CleaningStep
from terakoya.log import plural
from terakoya_cleaning import deduplication, near_duplicates, sketches
from terakoya_cleaning.notes import ArraysOnDisk
from terakoya_cleaning.sentences import split_sentences

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


class Nfkc(CleaningStep):
    """Applies Unicode normalisation form NFKC: full-width letters and half-width kana become the usual ones."""

    drops: ClassVar = False

    def change(self, text: str) -> str:
        return unicodedata.normalize("NFKC", text)


class Sentences(CleaningStep):
    """Puts each sentence on a line of its own."""

    drops: ClassVar = False

    def change(self, text: str) -> str:
        return split_sentences(text)


class Length(CleaningStep):
    """Drops documents with fewer or more characters than the limits."""

    min_characters: int = Field(default=0, ge=0)
    """The shortest document that stays. Unit: characters."""
    max_characters: int | None = Field(default=None, ge=1)
    """The longest document that stays; null is no limit. Unit: characters."""

    def keeps(self, text: str) -> bool:
        return self.min_characters <= len(text) and (self.max_characters is None or len(text) <= self.max_characters)

    def why(self, text: str) -> str:
        return f"{len(text):,} character{plural(len(text))}"


class Characters(CleaningStep):
    """Drops documents by the share of one kind of character among the characters that are not white space."""

    repeats: ClassVar = True
    test_settings: ClassVar[Mapping[str, Any]] = {"of": "kana", "min_share": 0.5}

    of: Literal["japanese", "kana", "kanji", "latin", "digits"]
    """The kind of character that is counted."""
    min_share: float = Field(default=0.0, ge=0, le=1)
    """The smallest share with which a document stays, from 0 to 1."""
    max_share: float = Field(default=1.0, ge=0, le=1)
    """The largest share with which a document stays, from 0 to 1."""

    @property
    def reason(self) -> str:
        """The kind of character."""
        return self.of

    def keeps(self, text: str) -> bool:
        matching, total = self._count(text)
        return self.min_share * total <= matching <= self.max_share * total

    def why(self, text: str) -> str:
        matching, total = self._count(text)
        return f"{matching:,} of {total:,} characters"

    def _count(self, text: str) -> tuple[int, int]:
        return len(text) - len(_CHARACTERS[self.of].sub("", text)), len("".join(text.split()))


class ExactDuplicates(CleaningStep):
    """Keeps only the first document of each text."""

    @property
    def note_type(self) -> np.dtype:
        """A hash of the text."""
        return np.dtype(("<u8", (2,)))

    def note(self, text: str) -> np.ndarray:
        return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")

    def drop(self, notes: Sequence[np.ndarray], left: np.ndarray) -> np.ndarray:
        return deduplication.find_exact_duplicates(notes, left)


class NearDuplicates(CleaningStep):
    """Keeps only the first of documents with similar sets of character n-grams, as estimated by sketches."""

    threshold: float = Field(default=0.8, ge=0.2, le=0.95)
    """The Jaccard similarity from which two documents count as the same, from 0 to 1. Of those that have just this one
    97 % are found, and some that have a little less."""
    permutations: int = Field(default=512, ge=64, le=4096, multiple_of=8)
    """Number of values of a sketch: more give a better estimate, and need more time and room on disk."""
    characters: int = Field(default=5, ge=1)
    """The length of the n-grams. Unit: characters."""

    @cached_property
    def _layout(self) -> near_duplicates.Layout:
        return near_duplicates.Layout.of(self.threshold, self.permutations)

    def versions(self) -> Mapping[str, str]:
        return {"sketches": str(sketches.VERSION)}

    @property
    def note_type(self) -> np.dtype:
        """The sketch of the text."""
        return np.dtype(("<u8", (self.permutations * self._layout.bits // 64,)))

    def note(self, text: str) -> np.ndarray:
        return sketches.sketch_text(text, size=self.permutations, characters=self.characters, bits=self._layout.bits)

    def drop(self, notes: Sequence[np.ndarray], left: np.ndarray) -> np.ndarray:
        progress = notes.progress if isinstance(notes, ArraysOnDisk) else None
        return near_duplicates.find_near_duplicates(notes, left, self._layout, progress=progress)


class HoldOut(CleaningStep):
    """Holds out a share of the documents for validation, chosen by a hash of their text, so that equal texts are either
    all held out or all kept."""

    drops: ClassVar = False
    test_settings: ClassVar[Mapping[str, Any]] = {"share": 0.5}

    share: float = Field(gt=0, lt=1)
    """The share of the documents that is held out, between 0 and 1."""
    seed: int = 0
    """The seed of the hash: another seed holds other documents out."""

    def holds_out(self, text: str) -> bool:
        """Whether the document with this text is held out."""
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(self.seed).encode()).digest()
        return int.from_bytes(digest, "little") < self.share * 2**64

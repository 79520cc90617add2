"""The word finder `example`: runs of characters that are no white space, cut after each hyphen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from terakoya import hookimpl
from terakoya.components import FindWords, WordFinder


class Example(WordFinder):
    """Words end at white space and after each of some characters."""

    ends: str = "-"
    """The characters after which a word ends."""

    def build(self) -> FindWords:
        """Returns a new function that finds the words of each text, as spans (W, 2) of its characters."""
        ends = re.escape(self.ends)
        pattern = re.compile(rf"[^\s{ends}]*[{ends}]|[^\s{ends}]+" if ends else r"\S+")

        def find(texts: Sequence[str]) -> list[np.ndarray]:
            return [
                np.array([word.span() for word in pattern.finditer(text)], np.int64).reshape(-1, 2) for text in texts
            ]

        return find

    def fingerprint(self) -> Mapping[str, str]:
        """Returns everything, other than the settings, on which the words depend. Change the version with the rules."""
        return {"version": "1"}


@hookimpl
def register_word_finders() -> dict[str, type[WordFinder]]:
    """Registers `example`: `terakoya prepare --words example`."""
    return {"example": Example}

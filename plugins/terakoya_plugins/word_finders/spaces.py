"""The words of languages that write spaces between them."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

from terakoya import hookimpl
from terakoya.components import FindWords, WordFinder

NAME = "spaces"


class Spaces(WordFinder):
    """The words between white space, for English and other languages that write spaces between words."""

    punctuation: bool = True
    """Whether each punctuation mark and each symbol is a word of its own, as for BERT; else it belongs to the word that
    it touches."""

    def build(self) -> FindWords:
        marks = _marks() if self.punctuation else ""
        pattern = re.compile(rf"[{marks}]|[^\s{marks}]+" if marks else r"\S+")

        def find(texts: Sequence[str]) -> list[np.ndarray]:
            return [
                np.array([word.span() for word in pattern.finditer(text)], np.int64).reshape(-1, 2) for text in texts
            ]

        return find

    def fingerprint(self) -> Mapping[str, str]:
        """Implements `WordFinder.fingerprint`: Python's tables say what a punctuation mark is."""
        return {"unicode": unicodedata.unidata_version}


def _marks() -> str:
    characters = map(chr, range(sys.maxunicode + 1))
    return re.escape("".join(each for each in characters if unicodedata.category(each)[0] in "PS"))


@hookimpl
def register_word_finders() -> Mapping[str, type[WordFinder]]:
    return {NAME: Spaces}

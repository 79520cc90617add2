"""Finds the words of a list in texts: without differences of width and case, of two that overlap the earlier and longer
one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from terakoya.corpus.utf8_reader import open_text
from terakoya.errors import UserError
from terakoya.folder_kinds import missing_file
from terakoya_screening.code_points import ngram_hashes, normalise

_TABLE_BITS = 20
_BEGINNING = 3


class WordList:
    """The words of a list. Those with ! before them are exceptions, which are found but not told."""

    def __init__(self, words: Sequence[str]) -> None:
        self._by_beginning: dict[str, list[str]] = defaultdict(list)
        self._tables: dict[int, np.ndarray] = {}
        self._exceptions = {_text(normalise(word[1:])) for word in words if word[0] == "!"}
        normal = {_text(normalise(word.removeprefix("!"))) for word in words}
        for word in sorted(normal, key=lambda word: (-len(word), word)):
            width = min(_BEGINNING, len(word))
            self._by_beginning[word[:width]].append(word)
            table = self._tables.setdefault(width, np.zeros(1 << _TABLE_BITS, bool))
            table[_beginnings(normalise(word)[:width], width)] = True

    def find(self, text: str) -> list[str]:
        """Returns the words in `text`, in their order and in normal form, each as often as it is there. A word that
        begins or ends in a letter or digit of ASCII is not found inside a longer one."""
        codes = normalise(text)
        starts = [
            table.take(_beginnings(codes, width), mode="clip").nonzero()[0] for width, table in self._tables.items()
        ]
        found: list[str] = []
        candidates = np.unique(np.concatenate(starts)).tolist()
        if not candidates:
            return found
        normal, end = _text(codes), 0
        for start in candidates:
            if start >= end and (word := self._word_at(normal, start)):
                end = start + len(word)
                if word not in self._exceptions:
                    found.append(word)
        return found

    def _word_at(self, text: str, start: int) -> str:
        beginnings = (text[start : start + width] for width in sorted(self._tables, reverse=True))
        words = (word for beginning in beginnings for word in self._by_beginning.get(beginning, ()))
        return next((word for word in words if text.startswith(word, start) and _is_whole(text, start, word)), "")


def _is_whole(text: str, start: int, word: str) -> bool:
    end = start + len(word)
    return not (
        (start and _is_latin(text[start - 1]) and _is_latin(word[0]))
        or (end < len(text) and _is_latin(text[end]) and _is_latin(word[-1]))
    )


def _is_latin(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _beginnings(codes: np.ndarray, width: int) -> np.ndarray:
    """Returns where the table has each `width` of `codes`, (N,): (N - width + 1,)."""
    return (ngram_hashes(codes, width) >> np.uint64(64 - _TABLE_BITS)).view(np.int64)


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


def read_word_list(file: Path) -> WordList:
    """Returns the words of `file`: one a line; empty lines and those that begin with # mean nothing. Raises UserError
    if there is no such file, no text in UTF-8 or no word in it."""
    words = [line.strip() for line in read_lines(file) if line.strip().strip("!") and not line.startswith("#")]
    if not words:
        raise UserError(f"{file}: expected a word a line, found none")
    return WordList(words)


def read_lines(file: Path) -> list[str]:
    """Returns the lines of a text file. Raises UserError if there is no such file, or if it is no text in UTF-8."""
    if not file.is_file():
        raise UserError(f"{file}: {missing_file(file)}")
    try:
        with open_text(file) as stream:
            return stream.read().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read: {error}; save it as UTF-8 text") from None

"""The words, lines and sentences of a text, also of one without spaces, as the rules of filters count them.

A word is a run of characters of one kind: kanji, hiragana, katakana, or what stands between spaces and Japanese
punctuation. In text without Japanese these are the words between spaces, which the sources of the rules count. Runs
need no dictionary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

HIRAGANA = "\u3041-\u309f"
KATAKANA = "\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
KANJI = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
JAPANESE = HIRAGANA + KATAKANA + KANJI
"""Ranges for a class of a regular expression."""

_PUNCTUATION = "\u3000-\u3004\u3008-\u303f\u30fb\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
_SPACES = "\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f"

SENTENCE_ENDS = tuple("。．！？!?.」』）】”\"'")
"""What ends a line that is a sentence: C4's marks, and those of Japanese."""

SENTENCE = re.compile(r"[。．！？!?]+|\.+(?=[\s\"'”]|$)|[」』](?=\s*(?:\n|$))", re.MULTILINE)
"""An end of a sentence, of direct speech on a line of its own too."""


def _kinds() -> np.ndarray:
    kinds = np.ones(0x110000, "u1")
    for kind, ranges in ((0, _SPACES + _PUNCTUATION), (2, KANJI), (3, HIRAGANA), (4, KATAKANA)):
        for first, last in re.findall("(?s)(.)(?:-(.))?", ranges):
            kinds[ord(first) : ord(last or first) + 1] = kind
    return kinds


_KINDS = _kinds()
"""(1114112,) the kind of each character; 0 is none of a word."""

_FACTOR = 0x9E3779B97F4A7C15
_POWERS = np.cumprod(np.full(1024, _FACTOR, "u8"))


@dataclass(frozen=True)
class Words:
    """The words of a text in their order.

    Attributes:
        starts, ends: (W,) where each begins and ends. Unit: characters.
        hashes: (W,) u8, the same for the same word.
    """

    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray


def codes_of(text: str) -> np.ndarray:
    """Returns the characters of `text` as numbers, (C,) u4."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def find_words(text: str) -> Words:
    """Returns the words of `text`."""
    codes = codes_of(text)
    kinds = _KINDS[codes]
    edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    starts, ends = np.concatenate(([0], edges)), np.concatenate((edges, [len(codes)]))
    lengths = ends - starts
    if not len(codes):
        return Words(starts[:0], ends[:0], np.zeros(0, "u8"))
    places = np.arange(len(codes)) - np.repeat(starts, lengths)
    hashes = np.add.reduceat((codes.astype("u8") + np.uint64(1)) * _POWERS[places % len(_POWERS)], starts)
    words = kinds[starts] != 0
    return Words(starts[words], ends[words], hashes[words])


@cache
def _letters() -> np.ndarray:
    table = np.ones(0x110000, bool)
    table[:0x10000] = [chr(code).isalpha() for code in range(0x10000)]
    return table


def share_with_letter(text: str, words: Words) -> float:
    """Returns the share of `words`, of which there has to be one, that have a letter of any script, from 0 to 1."""
    before = np.concatenate(([0], np.cumsum(_letters()[codes_of(text)])))
    return float(np.mean(before[words.ends] > before[words.starts]))


def lines_of(text: str) -> list[str]:
    """Returns the lines of `text` that are not empty, without the white space around them."""
    return [line for each in text.split("\n") if (line := each.strip())]

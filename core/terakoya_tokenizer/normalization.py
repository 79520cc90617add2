"""Where the characters of a normalised text (NFKC) come from in the text as it was.

NFKC replaces most characters by one character each, such as Ａ by A. Others grow (㌔ becomes キロ), and some join the
character before them (ｶ and ﾞ become ガ). Only around those do positions shift.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LAST = 0x1FFFF
"""Beyond the first two planes no character grows or joins another."""
LONGEST = 32
"""A longer run of joining characters is not divided."""


class _Moving(NamedTuple):
    """The characters around which positions shift.

    Attributes:
        joining: those that join the one before them.
        growing: the others that grow, and the number of characters that each becomes.
        places: the pattern of a character with those that may join it, or of one that grows.
        codes: whether each code point up to `LAST` + 1 is one of them.
    """

    joining: frozenset[str]
    growing: dict[str, int]
    places: re.Pattern[str]
    codes: np.ndarray


def are_moved(texts: Sequence[str]) -> np.ndarray:
    """Returns for each of `texts`, of which none is empty, whether characters are elsewhere once it is normalised; True
    also for a few in which they are not."""
    codes = np.minimum(np.array(["".join(texts)]).view(np.uint32), LAST + 1)
    begins = np.cumsum([0, *map(len, texts)])[:-1]
    moved: np.ndarray = np.logical_or.reduceat(_moving().codes.take(codes), begins)
    return moved


def nfkc_spans(text: str) -> tuple[list[int], list[int]] | None:
    """Returns for each character of the normalised `text` the position of the first character that it comes from, and
    the position after the last one; None where each comes from the character at its own position.

    Characters that NFKC changes only together come all from all of them.
    """
    if text.isascii():
        return None
    joining, growing, places, _ = _moving()
    if joining.isdisjoint(text):  # in nearly all texts
        if growing.keys().isdisjoint(text):
            return None
        origins = [place for place, character in enumerate(text) for _ in range(growing.get(character, 1))]
        return origins, [place + 1 for place in origins]
    starts: list[int] = []
    stops: list[int] = []
    done = 0
    for match in places.finditer(text):
        starts += range(done, match.start())
        stops += range(done + 1, match.start() + 1)
        done = match.start()
        for size, count in _blocks(match.group()):
            starts += [done] * size
            stops += [done + count] * size
            done += count
    starts += range(done, len(text))
    stops += range(done + 1, len(text) + 1)
    return starts, stops


@functools.cache
def _moving() -> _Moving:
    characters = [chr(code) for code in range(0x80, LAST + 1) if not 0xD800 <= code < 0xE000]
    decomposed = (unicodedata.decomposition(character).split() for character in characters)
    seconds = {chr(int(parts[1], 16)) for parts in decomposed if len(parts) == 2 and not parts[0].startswith("<")}
    seconds.update(map(chr, (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))))  # Hangul's vowels and final consonants
    joining: list[str] = []
    growing: dict[str, int] = {}
    for character in characters:
        first = unicodedata.normalize("NFKD", character)[0]
        if unicodedata.combining(first) or first in seconds:
            joining.append(character)
        elif (size := len(unicodedata.normalize("NFKC", character))) != 1:
            growing[character] = size
    joins = "".join(map(re.escape, joining))
    grows = "".join(map(re.escape, growing))
    codes = np.zeros(LAST + 2, bool)
    codes[list(map(ord, (*joining, *growing)))] = True
    places = re.compile(f"[^{joins}]?[{joins}]+|[{grows}]", re.DOTALL)
    return _Moving(frozenset(joining), growing, places, codes)


def _blocks(text: str) -> list[tuple[int, int]]:
    """Returns the smallest parts of `text` that can be normalised one by one: the length of each after and before."""
    blocks = []
    while text:
        whole = unicodedata.normalize("NFKC", text)
        cuts = range(1, len(text)) if len(text) <= LONGEST else ()
        cut = next((cut for cut in cuts if _normal(text[:cut]) + _normal(text[cut:]) == whole), len(text))
        blocks.append((len(_normal(text[:cut])), cut))
        text = text[cut:]
    return blocks


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)

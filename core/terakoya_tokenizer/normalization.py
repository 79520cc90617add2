"""Where the characters of a normalised text (NFKC) come from in the text as it was.

NFKC replaces most characters by one character each, such as Ａ by A. Others grow (㌔ becomes キロ), and some join the
character before them (ｶ and ﾞ become ガ). Only around those do positions shift; `_shifts` finds them.
"""

from __future__ import annotations

import functools
import re
import unicodedata

LAST = 0x1FFFF
"""Beyond the first two planes no character grows or joins another."""
LONGEST = 32
"""A longer run of joining characters is not divided."""


def nfkc_spans(text: str) -> tuple[list[int], list[int]] | None:
    """Returns for each character of the normalised `text` the position of the first character that it comes from, and
    the position after the last one; None where each comes from the character at its own position.

    Characters that NFKC changes only together come all from all of them.
    """
    shifting, places = _shifts()
    if text.isascii() or shifting.isdisjoint(text):  # a set is many times faster than the pattern
        return None
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
def _shifts() -> tuple[frozenset[str], re.Pattern[str]]:
    """Returns the characters that join the one before them or grow, and the pattern of all places where positions
    shift: a character with those that may join it, or one that grows."""
    characters = [chr(code) for code in range(0x80, LAST + 1) if not 0xD800 <= code < 0xE000]
    decomposed = (unicodedata.decomposition(character).split() for character in characters)
    seconds = {chr(int(parts[1], 16)) for parts in decomposed if len(parts) == 2 and not parts[0].startswith("<")}
    seconds.update(map(chr, (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))))  # Hangul's vowels and final consonants
    joining, growing = [], []
    for character in characters:
        first = unicodedata.normalize("NFKD", character)[0]
        if unicodedata.combining(first) or first in seconds:
            joining.append(character)
        elif len(unicodedata.normalize("NFKC", character)) != 1:
            growing.append(character)
    joins = "".join(map(re.escape, joining))
    grows = "".join(map(re.escape, growing))
    return frozenset(joining + growing), re.compile(f"[^{joins}]?[{joins}]+|[{grows}]", re.DOTALL)


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

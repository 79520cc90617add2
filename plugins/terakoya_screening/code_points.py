"""Text as arrays of code points without differences of width and case, and hashes of its n-grams."""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP volume 3, 6.4)
_CHANGED_BELOW = 0x30000
"""Above, NFKC and case folding change nothing."""


def normalise(text: str) -> np.ndarray:
    """Returns the code points of `text` in NFKC with its case folded, (N,) uint32."""
    table, _ = _tables()
    codes = _encode(text.replace("…", "..."))
    normal = table.take(codes, mode="clip")
    if not normal.all() and "\0" not in text:
        return _encode(unicodedata.normalize("NFKC", text).casefold())
    return normal if codes.max(initial=0) < _CHANGED_BELOW else np.where(codes < _CHANGED_BELOW, normal, codes)


def letters(codes: np.ndarray) -> np.ndarray:
    """Returns which of `codes`, (N,), are letters or digits: (N,) bool."""
    _, is_letter = _tables()
    return is_letter.take(codes, mode="clip")


def ngram_hashes(values: np.ndarray, width: int) -> np.ndarray:
    """Returns a hash of each `width` values in a row of `values`, (N,): (max(0, N - width + 1),) uint64."""
    count = max(0, len(values) - width + 1)
    hashes, pieces = np.zeros(count, np.uint64), (values.astype(np.uint64) + np.uint64(1)) * _FACTOR
    size, done = 1, 0
    while True:  # `pieces` hash 1, 2, 4, ... values; the width is a sum of some of these
        factor = np.uint64(pow(int(_FACTOR), size, 1 << 64))
        if width & size:
            hashes *= factor
            hashes += pieces[done : done + count]
            done += size
        if done == width:
            return hashes
        joined = pieces[:-size] * factor
        joined += pieces[size:]
        pieces, size = joined, 2 * size


def _encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns the normal form of each code point, 0 where it is not one that stands by itself, and whether it is a
    letter or a digit; for code points up to and including `_CHANGED_BELOW`, as which all above count."""
    forms = np.arange(_CHANGED_BELOW + 1, dtype=np.uint32)
    is_letter = np.zeros(_CHANGED_BELOW + 1, bool)
    for code in range(1, _CHANGED_BELOW):
        if 0x3400 <= code < 0xA000 or 0xAC00 <= code < 0xD7A4 or 0x20000 <= code < 0x2F800:
            is_letter[code] = True  # Han and Hangul: letters in their normal form
            continue
        character = chr(code)
        form = unicodedata.normalize("NFKC", character).casefold()
        forms[code] = ord(form) if len(form) == 1 and not _joins(form) else 0
        is_letter[code] = character.isalnum()
    is_letter[_CHANGED_BELOW] = True  # Han of the third plane
    return forms, is_letter


def _joins(form: str) -> bool:
    """Whether a normal form may become one with the character before."""
    return unicodedata.category(form)[0] == "M" or "\u1100" <= form <= "\u11ff"

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
    low = np.minimum(codes, _CHANGED_BELOW)
    normal = table[low]
    if (normal == 0).any() and "\0" not in text:
        return _encode(unicodedata.normalize("NFKC", text).casefold())
    return normal if low.max(initial=0) < _CHANGED_BELOW else np.where(low < _CHANGED_BELOW, normal, codes)


def letters(codes: np.ndarray) -> np.ndarray:
    """Returns which of `codes`, (N,), are letters or digits: (N,) bool."""
    _, is_letter = _tables()
    return is_letter[np.minimum(codes, _CHANGED_BELOW)]


def ngram_hashes(values: np.ndarray, width: int) -> np.ndarray:
    """Returns a hash of each `width` values in a row of `values`, (N,): (max(0, N - width + 1),) uint64."""
    powers, size, done = (values.astype(np.uint64) + np.uint64(1)) * _FACTOR, 1, 0
    hashes = np.zeros(max(0, len(values) - width + 1), np.uint64)
    while size <= width:  # `powers` hash pieces of 1, 2, 4, ... values; the width is a sum of some
        if width & size:
            hashes = _join(hashes, powers[done : done + len(hashes)])
            done += size
        powers = _join(powers[: max(0, len(powers) - size)], powers[size:])
        size *= 2
    return hashes


def _join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    joined = (left * _FACTOR) ^ (left >> np.uint64(29))
    joined += right
    return joined


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

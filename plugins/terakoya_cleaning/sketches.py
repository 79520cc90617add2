"""Sketches of texts, from which the share of n-grams that two texts have in common is estimated.

The share of equal values in two sketches is, on average, the Jaccard similarity of the sets of n-grams. The method is
fast similarity sketching (Dahlgaard, Knudsen and Thorup, 2017): in each round every n-gram goes to one slot, which
keeps the smallest hash, until no slot is empty. A long text needs one round or a few, where MinHash needs as many as
there are values. Only some bits of each value are kept (b-bit MinHash; Li and König, 2010).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from terakoya_tokenizer.kernels import address, load_library

VERSION = 2
"""Raise this number when the sketch of a text changes."""

_FACTOR = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP volume 3, 6.4)
_HASHES_AT_ONCE = 1 << 13


def sketch_text(text: str, *, size: int, characters: int, bits: int) -> np.ndarray:
    """Returns the sketch of the n-grams of `text` without its white space: `size` values of `bits` bits, packed into
    (size * bits / 64,) uint64.

    characters: the length of the n-grams; a shorter text is one n-gram. bits: 8, 16 or 32. The sketch of an empty text
    is zero.
    """
    code_points = "".join(text.split()).encode("utf-32-le")
    length = len(code_points) // 4
    if not length:
        return np.zeros(size * bits // 64, "<u8")
    width = min(characters, length)
    if (kernels := _kernels()) is None:
        slots = fill_slots(np.frombuffer(code_points, "<u4"), width, size)
    else:
        slots = np.empty(size + length - width + 1, np.uint64)
        kernels.fill_slots(code_points, length - width + 1, width, _FACTOR, address(slots), size)
    return slots[:size].astype(f"<u{bits // 8}").view("<u8")


def fill_slots(code_points: np.ndarray, width: int, size: int) -> np.ndarray:
    """Returns what `fill_slots` in C does, (size,) uint64, from (length,) code points.

    It may make more rounds; after all slots have a value none changes.
    """
    slots = np.full(size, ~np.uint64(0))
    grams = np.zeros(len(code_points) - width + 1, np.uint64)
    for offset in range(width):
        grams = (grams + code_points[offset : offset + len(grams)]) * np.uint64(_FACTOR)
    grams = mix(grams)  # else that of a neighbouring code point would be that of the next round
    step = max(1, _HASHES_AT_ONCE // len(grams))
    first = 0
    while slots.max() == ~np.uint64(0):
        rounds = np.arange(first, min(first + step, 2 * size), dtype=np.uint64)[:, None]
        hashes = mix(grams + rounds * np.uint64(_FACTOR))
        chosen = np.where(rounds < size, (hashes >> np.uint64(32)) * np.uint64(size) >> np.uint64(32), rounds - size)
        values = rounds << np.uint64(32) | hashes & np.uint64(0xFFFFFFFF)
        np.minimum.at(slots, chosen.ravel().astype(np.intp), values.ravel())
        first += step
    return slots


def mix(bits: np.ndarray) -> np.ndarray:
    """Returns hashes of uint64 `bits`, of the same shape: SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    """The functions of `sketches.c`; None where they cannot be compiled."""
    if (kernels := load_library(Path(__file__).with_name("sketches.c"))) is not None:
        number = ctypes.c_int64
        kernels.fill_slots.argtypes = (ctypes.c_char_p, number, number, ctypes.c_uint64, ctypes.c_void_p, number)
        kernels.fill_slots.restype = None
    return kernels

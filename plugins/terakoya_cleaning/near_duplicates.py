"""Finds similar documents of a corpus, from a sketch of each document on disk.

Locality-sensitive hashing (Indyk and Motwani, 1998): a few values of a sketch make a band, and documents with an equal
band are compared by their whole sketches. A band of all documents is sorted at a time, so no index is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from terakoya.atomic_files import write_atomically
from terakoya_cleaning.sketches import mix

_BANDS_AT_ONCE = 5  # 40 bytes of memory for each document
_KEYS_AT_ONCE = 1 << 20
_PAIRS_AT_ONCE = 1 << 14
_MOST_COMPARED = 64  # in a band: a group of more that are alike in it alone would take the square of its size
_MISSED = 0.005
_DEVIATIONS = 2


@dataclass(frozen=True)
class Layout:
    """How sketches are compared.

    Attributes:
        bits: of each value. A band has 64 bits: fewer, larger values find less similar documents.
        bands: the number that is compared; the others only serve the estimate.
        equal: number of equal values of similar documents.
    """

    bits: int
    bands: int
    equal: int

    @classmethod
    def of(cls, threshold: float, size: int) -> Layout:
        """Returns the layout with which 99.5 % of documents with the Jaccard similarity `threshold` have an equal band,
        if sketches of `size` values are enough for that, and 97 % enough equal values."""
        for bits in (8, 16, 32):
            rows = 64 // bits
            bands = math.ceil(math.log(_MISSED) / math.log(1 - threshold**rows))
            if bands <= size // rows:
                break
        similarity = threshold - _DEVIATIONS * math.sqrt(threshold * (1 - threshold) / size)
        chance = 2**-bits  # that different values have the same bits
        return cls(bits, min(bands, size // rows), math.ceil(size * (chance + (1 - chance) * similarity)))


def find_near_duplicates(
    sketches: Sequence[np.ndarray], left: np.ndarray, layout: Layout, *, progress: Path | None = None
) -> np.ndarray:
    """Returns the indices of the documents that are similar to an earlier one that no band so far has dropped.

    sketches: (n, bands) uint64 for each part of the corpus, in its order. left: (N,) bool, the documents to compare.
    progress: a file that keeps what is found, so that the next call continues. Takes 46 bytes of memory for each
    document, and about 100 MB.
    """
    ends = np.cumsum([len(part) for part in sketches], dtype=np.int64)
    kept, done = left.copy(), 0
    if progress is not None and progress.exists():
        done, packed = int.from_bytes((content := progress.read_bytes())[:8], "little"), content[8:]
        kept = np.unpackbits(np.frombuffer(packed, "u1"), count=len(left)).view(bool)
    index_bits = np.uint64(max(1, len(left).bit_length()))
    for first in range(done, layout.bands, _BANDS_AT_ONCE):
        last = min(first + _BANDS_AT_ONCE, layout.bands)
        bands = _read_bands(sketches, kept, slice(first, last), index_bits)
        for keys in bands:
            keys.sort()
            for documents, groups in _groups(keys, index_bits):
                _drop_similar(sketches, ends, layout, documents, groups, kept)
        del bands, keys
        if progress is not None:
            with write_atomically(progress) as stream:
                stream.write(last.to_bytes(8, "little") + np.packbits(kept).tobytes())
    return np.flatnonzero(left & ~kept)


def _read_bands(sketches: Sequence[np.ndarray], kept: np.ndarray, bands: slice, index_bits: np.uint64) -> np.ndarray:
    """Returns a key for each band and kept document, (B, K) uint64: a hash of the band above the document's index, so
    that equal bands lie side by side once the keys are sorted, in the order of the corpus."""
    keys = np.empty((bands.stop - bands.start, int(np.count_nonzero(kept))), np.uint64)
    start = filled = 0
    for part in sketches:
        rows = np.flatnonzero(kept[start : start + len(part)])
        hashes = mix(part[:, bands][rows].T) >> index_bits << index_bits
        keys[:, filled : filled + len(rows)] = hashes | (start + rows).astype(np.uint64)
        start += len(part)
        filled += len(rows)
    return keys


def _groups(keys: np.ndarray, index_bits: np.uint64) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields documents with equal bands, (M,) indices, and beside each a number of its group, both increasing."""
    start = 0
    while start < len(keys):
        stop = min(start + _KEYS_AT_ONCE, len(keys))
        last_of_group = keys[stop - 1] | ((np.uint64(1) << index_bits) - np.uint64(1))
        stop = int(np.searchsorted(keys, last_of_group, "right"))
        groups = keys[start:stop] >> index_bits
        same = groups[1:] == groups[:-1]
        rows = np.flatnonzero(np.append(same, False) | np.append(False, same))
        yield (keys[start:stop][rows] & ((np.uint64(1) << index_bits) - np.uint64(1))).astype(np.int64), groups[rows]
        start = stop


def _drop_similar(
    sketches: Sequence[np.ndarray],
    ends: np.ndarray,
    layout: Layout,
    documents: np.ndarray,
    groups: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Sets `kept` of those `documents` to False that are similar to an earlier one of their group that stays."""
    documents, groups = documents[kept[documents]], groups[kept[documents]]
    for _ in range(_MOST_COMPARED):
        is_first = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
        firsts = documents[is_first][np.cumsum(is_first) - 1][~is_first]
        documents, groups = documents[~is_first], groups[~is_first]
        if not len(documents):
            return
        stays = np.ones(len(documents), bool)
        for start in range(0, len(documents), _PAIRS_AT_ONCE):
            pairs = np.stack([firsts, documents], axis=1)[start : start + _PAIRS_AT_ONCE]
            one, other = _read_sketches(sketches, ends, pairs)
            kind = f"<u{layout.bits // 8}"
            equal = np.count_nonzero(one.view(kind) == other.view(kind), axis=1)
            stays[start : start + len(pairs)] = equal < layout.equal
        kept[documents[~stays]] = False
        documents, groups = documents[stays], groups[stays]


def _read_sketches(sketches: Sequence[np.ndarray], ends: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Returns the sketches of the documents of `pairs`, (P, 2), as (2, P, bands); each part is read once."""
    documents, places = np.unique(pairs.T, return_inverse=True)
    found = np.empty((len(documents), sketches[0].shape[1]), np.uint64)
    start = 0
    for number, some in enumerate(np.split(documents, np.searchsorted(documents, ends[:-1]))):
        if len(some):
            part = sketches[number]
            found[start : start + len(some)] = part[some - (int(ends[number]) - len(part))]
            start += len(some)
    return found[places.reshape(2, -1)]

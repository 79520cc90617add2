"""Finds duplicates among the documents of a corpus, from a record of each document on disk.

Near duplicates are found by MinHash and locality-sensitive hashing (Broder, 1997; Indyk and Motwani, 1998), with
datasketch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from terakoya.errors import UserError

if TYPE_CHECKING:
    from datasketch import MinHash

_DOCUMENTS_PER_PASS = 2_000_000
_SHINGLES_AT_ONCE = 4096
_SEED = 1
_WEIGHTS = (0.1, 0.9)  # of false positives, which are checked again, and of false negatives, which are not
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP volume 3, 6.4)


def find_exact_duplicates(hashes: Sequence[np.ndarray], left: np.ndarray) -> np.ndarray:
    """Returns the indices of all but the first of the documents with equal hashes.

    hashes: (n, 2) uint64 for each part of the corpus, in its order. left: (N,) bool, the documents to compare. Makes
    one pass over the hashes for each two million documents, so that only about so many are in memory at a time.
    """
    passes = max(1, -(-len(left) // _DOCUMENTS_PER_PASS))
    duplicates = [np.zeros(0, np.int64)]
    for remainder in range(passes):
        selected, numbers, start = [np.zeros((0, 2), "<u8")], [np.zeros(0, np.int64)], 0
        for part in hashes:
            rows = np.flatnonzero(left[start : start + len(part)] & (part[:, 0] % np.uint64(passes) == remainder))
            selected.append(part[rows])
            numbers.append(start + rows)
            start += len(part)
        values, documents = np.concatenate(selected), np.concatenate(numbers)
        order = np.lexsort((documents, values[:, 1], values[:, 0]))
        same = (values[order[1:]] == values[order[:-1]]).all(axis=1)
        duplicates.append(documents[order[1:]][same])
    return np.concatenate(duplicates)


def minhash_signature(text: str, *, permutations: int, characters: int) -> np.ndarray:
    """Returns the MinHash of the set of n-grams of `text` without its white space, (permutations,) uint32."""
    code_points = np.frombuffer("".join(text.split()).encode("utf-32-le"), "<u4").astype(np.uint64)
    width = min(characters, max(1, len(code_points)))
    shingles = np.zeros(max(0, len(code_points) - width + 1), np.uint64)
    for offset in range(width):
        shingles = (shingles + code_points[offset : offset + len(shingles)]) * np.uint64(_FACTOR)
    minhash = _minhash(permutations)
    unique = np.unique((shingles >> np.uint64(32)).astype(np.uint32)).tolist()
    for start in range(0, len(unique), _SHINGLES_AT_ONCE):
        minhash.update_batch(unique[start : start + _SHINGLES_AT_ONCE])
    return np.asarray(minhash.hashvalues, "<u4")


def find_near_duplicates(signatures: Sequence[np.ndarray], left: np.ndarray, threshold: float) -> np.ndarray:
    """Returns the indices of the documents that are similar to an earlier one that stays.

    Two documents are similar if at least the share `threshold` of their signatures, (n, permutations) uint32, is equal.
    Arguments are as of `find_exact_duplicates`. datasketch's index of the kept documents is in memory, about 5 KB each
    at the default settings: 10 GB for two million documents.
    """
    from datasketch import MinHashLSH

    if not signatures:
        return np.zeros(0, np.int64)
    permutations = signatures[0].shape[1]
    index = MinHashLSH(threshold=threshold, num_perm=permutations, weights=_WEIGHTS)
    ends = np.cumsum([len(part) for part in signatures])
    duplicates: list[int] = []
    for document, signature in enumerate(each for part in signatures for each in part):
        if not left[document]:
            continue
        minhash = _minhash(permutations, np.array(signature))
        for other in index.query(minhash):
            number = int(np.searchsorted(ends, other, side="right"))
            part = signatures[number]
            if np.mean(signature == part[other - (int(ends[number]) - len(part))]) >= threshold:
                duplicates.append(document)
                break
        else:
            index.insert(document, minhash, check_duplication=False)
    return np.array(duplicates, np.int64)


def _minhash(permutations: int, values: np.ndarray | None = None) -> MinHash:
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise UserError('near_duplicates: needs datasketch: pip install "terakoya[data]"') from error
    return MinHash(permutations, seed=_SEED, hashfunc=int, hashvalues=values, scheme="affine32")

"""Finds equal documents of a corpus, from a record of each document on disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_DOCUMENTS_PER_PASS = 2_000_000


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

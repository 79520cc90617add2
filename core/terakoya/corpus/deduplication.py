"""Duplicates among the documents of a corpus, from a record of each on disk.

Near duplicates by MinHash and locality-sensitive hashing (Broder, 1997; Indyk and Motwani, 1998) as in datasketch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from terakoya.errors import UserError

if TYPE_CHECKING:
    from datasketch import MinHash

    from terakoya.corpus.cleaning_steps import NearDuplicates

_DOCUMENTS_PER_PASS = 2_000_000
_SHINGLES_AT_ONCE = 4096
_SEED = 1
_WEIGHTS = (0.1, 0.9)  # of false positives, which are looked at again, and of false negatives, which are not
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP volume 3, 6.4)


def mark_exact_duplicates(tables: Sequence[np.ndarray], verdicts: np.ndarray, number: int) -> None:
    """Sets the verdict of all but the first of documents with equal `hash` to `number`.

    tables: records of the documents, in the order of the corpus. verdicts: (N,) uint8; documents with a smaller one
    were dropped by an earlier step. The records are gone through once for each two million documents, so that no more
    than those are in memory.
    """
    turns = max(1, -(-len(verdicts) // _DOCUMENTS_PER_PASS))
    for turn in range(turns):
        hashes, numbers, start = [np.zeros((0, 2), "<u8")], [np.zeros(0, np.int64)], 0
        for table in tables:
            mine = verdicts[start : start + len(table)] > number
            mine &= table["hash"][:, 0] % np.uint64(turns) == turn
            found = np.flatnonzero(mine)
            hashes.append(table["hash"][found])
            numbers.append(start + found)
            start += len(table)
        values, at = np.concatenate(hashes), np.concatenate(numbers)
        order = np.lexsort((at, values[:, 1], values[:, 0]))
        same = (values[order[1:]] == values[order[:-1]]).all(axis=1)
        verdicts[at[order[1:]][same]] = number


def minhash_signature(text: str, step: NearDuplicates) -> np.ndarray:
    """The MinHash of the set of n-grams of `text`, white space aside, (permutations,) uint32."""
    points = np.frombuffer("".join(text.split()).encode("utf-32-le"), "<u4").astype(np.uint64)
    width = min(step.characters, max(1, len(points)))
    shingles = np.zeros(max(0, len(points) - width + 1), np.uint64)
    for offset in range(width):
        shingles = (shingles + points[offset : offset + len(shingles)]) * np.uint64(_FACTOR)
    minhash = _minhash(step)
    unique = np.unique((shingles >> np.uint64(32)).astype(np.uint32)).tolist()
    for start in range(0, len(unique), _SHINGLES_AT_ONCE):
        minhash.update_batch(unique[start : start + _SHINGLES_AT_ONCE])
    return np.asarray(minhash.hashvalues, "<u4")


def mark_near_duplicates(tables: Sequence[np.ndarray], verdicts: np.ndarray, number: int, step: NearDuplicates) -> None:
    """Sets the verdict of each document that is like an earlier one, which itself stays, to `number`.

    Two documents are alike if at least `threshold` of their signatures is equal. Shapes as in `mark_exact_duplicates`.
    datasketch keeps the kept documents in memory, about 5 KB each at the default settings: 10 GB for two million.
    """
    from datasketch import MinHashLSH

    index = MinHashLSH(threshold=step.threshold, num_perm=step.permutations, weights=_WEIGHTS)
    ends = np.cumsum([len(table) for table in tables])
    at = -1
    for table in tables:
        for record in table:
            at += 1
            if verdicts[at] <= number:
                continue
            own = np.array(record["signature"])
            minhash = _minhash(step, own)
            for other in index.query(minhash):
                part = int(np.searchsorted(ends, other, side="right"))
                theirs = tables[part][other - (int(ends[part]) - len(tables[part]))]["signature"]
                if np.mean(own == theirs) >= step.threshold:
                    verdicts[at] = number
                    break
            else:
                index.insert(at, minhash, check_duplication=False)


def _minhash(step: NearDuplicates, values: np.ndarray | None = None) -> MinHash:
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise UserError('near_duplicates: needs datasketch: pip install "terakoya[data]"') from error
    return MinHash(step.permutations, seed=_SEED, hashfunc=int, hashvalues=values, scheme="affine32")

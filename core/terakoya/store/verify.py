"""Checks a token store by reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from terakoya.store.token_store import TokenStore

_CHUNK = 1 << 20


def verify(folder: Path) -> list[str]:
    """Reads the whole store `folder` and returns a description of every fault; an empty list for a valid store.

    Checks sizes, hashes, that ids are in the vocabulary, and that index and documents are consistent.
    Raises UserError if the store cannot be opened at all.
    """
    store = TokenStore.open(folder, check_ids=False)
    faults: list[str] = []
    for name, facts in store.facts.files.items():
        file = store.folder / name
        if not file.is_file():
            faults.append(f"{file}: no such file")
            continue
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if (size := file.stat().st_size) != facts.size:
            faults.append(f"{file}: expected {facts.size:,} bytes, got {size:,}")
        elif digest != facts.sha256:
            faults.append(f"{file}: content changed: expected SHA-256 {facts.sha256}, got {digest}")
    size = store.facts.vocabulary.size
    for start, ids in _chunks(store.tokens):
        if int(ids.max()) >= size or int(ids.min()) < 0:
            at = start + int(np.flatnonzero((ids >= size) | (ids < 0))[0])
            faults.append(
                f"{store.folder / 'tokens.bin'}: token {at:,}: expected an id below {size:,}, got {store.tokens[at]}"
            )
            break
    faults += _index_faults(store)
    return faults


def _index_faults(store: TokenStore) -> list[str]:
    file = store.folder / "tokens.idx"
    index, faults, position = store.index, [], 0
    for start, lengths in _chunks(index.lengths):
        ends = position + np.cumsum(lengths, dtype=np.int64)
        starts = np.concatenate([[position], ends[:-1]]) * index.dtype.itemsize
        if int(lengths.min()) < 1 or not np.array_equal(starts, index.pointers[start : start + len(lengths)]):
            faults.append(
                f"{file}: lengths and byte pointers disagree in sequences {start:,} to {start + len(lengths):,}"
            )
        position = int(ends[-1])
    if position != store.facts.tokens:
        faults.append(f"{file}: lengths add up to {position:,} tokens, expected {store.facts.tokens:,}")
    documents = index.documents
    increasing = all(bool((np.diff(documents[s : s + _CHUNK + 1]) > 0).all()) for s in range(0, len(documents), _CHUNK))
    if documents[0] != 0 or documents[-1] != len(index.lengths) or not increasing:
        faults.append(f"{file}: expected document entries that rise from 0 to {len(index.lengths):,}")
    return faults


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK]

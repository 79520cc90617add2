"""Splits a store by document. The content of a document decides its part, so copies never get into two parts.

Letters: D documents, n sequences of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from terakoya.atomic_files import check_new_folder
from terakoya.errors import UserError
from terakoya.store.assembly import Bits, StoreHead, assemble_store, new_store_folder
from terakoya.store.file_hashes import check_hash, check_hashes
from terakoya.store.token_store import LEARNED, WORDS, Counts, StoreFacts, TokenStore

_DOCUMENTS, _TOKENS = 1 << 14, 1 << 20
"""Documents in a window and tokens in a chunk."""


def split(folder: Path, outs: Sequence[Path], *, weights: Sequence[int], seed: int = 0) -> list[StoreFacts]:
    """Splits the documents of the store `folder` among the new stores `outs`, roughly in proportion to `weights`.

    A hash of a document's ids and `seed` decides its part: a document goes to the same part in every store. The order
    of documents stays. Raises UserError if there are not as many `outs` as `weights`, if the sum of `weights` or the
    seed needs more than 63 bits, if an out folder is not empty, if a part gets no document, or if a file of the store
    does not have the hash in `store.json`.
    """
    if len(outs) != len(weights) or len(outs) < 2:
        raise UserError(f"--parts: expected one weight for each --out, two or more, got {len(weights)} for {len(outs)}")
    if min(weights) < 1:
        raise UserError(f"--parts: expected weights of at least 1, got {', '.join(map(str, weights))}")
    if sum(weights) >= 1 << 63:
        raise UserError(f"--parts: expected weights with a sum below 2^63, got {', '.join(map(str, weights))}")
    if not -(1 << 63) <= seed < 1 << 63:
        raise UserError(f"--seed: expected a number from -2^63 to 2^63 - 1, got {seed}")
    if len({Path(out).resolve() for out in outs}) < len(outs):
        raise UserError("--out: expected a different folder for each part, got one twice")
    for out in outs:
        check_new_folder(Path(out))
    store = TokenStore.open(Path(folder))
    flags = [f"tokens.{name}" for name in sorted(store.facts.counts.known & {WORDS, LEARNED})]
    check_hashes(store.folder, store.facts.files, "tokens.idx", *flags)
    parts = _assign_parts(store, weights, seed)
    counts = np.bincount(parts, minlength=len(weights))
    for number, count in enumerate(counts):
        if not count:
            raise UserError(
                f"{folder}: expected documents for every part, part {number + 1} of {','.join(map(str, weights))} gets "
                f"none of {len(parts):,}; give it a larger weight"
            )
    facts = []
    with ExitStack() as stack:
        folders = [stack.enter_context(new_store_folder(out)) for out in outs]
        for number, part in enumerate(folders):
            name = f"part {number + 1} of {','.join(map(str, weights))}, seed {seed}"
            head = StoreHead.of(
                store,
                inputs={**store.facts.inputs, "split": f"{name} of {store.fingerprint}"},
                options={**store.facts.options, "split": name},
            )
            facts.append(assemble_store(part, SplitContent(store, parts == number), head))
    return facts


@dataclass(frozen=True)
class SplitContent:
    """Those documents of a store for which `kept` (D,) is true, as a `StoreContent`."""

    store: TokenStore
    kept: np.ndarray

    @cached_property
    def totals(self) -> Counts:
        """The sums. Rejects, literal special tokens and notes stay with the whole store."""
        tokens = sum(stop - start for start, stop in self._tokens())
        sequences = sum(int(counts.sum()) for counts in self.documents())
        return Counts(tokens, sequences, int(self.kept.sum()), known=self.store.facts.counts.known)

    def ids(self) -> Iterator[np.ndarray]:
        for start, stop in self._tokens():
            yield np.asarray(self.store.tokens[start:stop])

    def lengths(self) -> Iterator[np.ndarray]:
        for first, _, counts, lengths in _windows(self.store):
            yield lengths[np.repeat(self.kept[first : first + len(counts)], counts)]

    def documents(self) -> Iterator[np.ndarray]:
        for first, _, counts, _ in _windows(self.store):
            yield counts[self.kept[first : first + len(counts)]]

    def flags(self, name: str) -> Iterator[Bits]:
        for start, stop in self._tokens():
            yield np.packbits(self.store.read_flags(name, start, stop), bitorder="little"), stop - start

    def sizes(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self.kept), _DOCUMENTS):
            yield self.store.sizes[first : first + _DOCUMENTS][self.kept[first : first + _DOCUMENTS]]

    def rejects(self) -> Iterator[bytes]:
        """Yields nothing: rejects stay with the whole store."""
        return iter(())

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges of kept tokens: adjacent documents together, at most `_TOKENS` tokens at a time."""
        for first, first_token, counts, lengths in _windows(self.store):
            bounds = _bounds(first_token, counts, lengths)
            kept = np.concatenate([[False], self.kept[first : first + len(counts)], [False]])
            for begin, end in np.flatnonzero(kept[1:] != kept[:-1]).reshape(-1, 2):
                for start in range(int(bounds[begin]), int(bounds[end]), _TOKENS):
                    yield start, min(start + _TOKENS, int(bounds[end]))


def _windows(store: TokenStore) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Yields for each window: its first document and first token, the sequences of each document, and the tokens of
    each sequence (n,)."""
    first_token = 0
    for first in range(0, store.facts.documents, _DOCUMENTS):
        ends = np.asarray(store.documents[first : first + _DOCUMENTS + 1])
        lengths = np.asarray(store.index.lengths[ends[0] : ends[-1]])
        yield first, first_token, np.diff(ends), lengths
        first_token += int(lengths.sum(dtype=np.int64))


def _bounds(first_token: int, counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns where each document of a window begins in the tokens, and where the last one ends."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return first_token + ends[np.concatenate([[0], np.cumsum(counts)])]


def _assign_parts(store: TokenStore, weights: Sequence[int], seed: int) -> np.ndarray:
    """Returns (D,) int32, the part of each document: its hash modulo the sum of the weights selects the part.

    The index must have been checked. Reads all ids, and raises UserError if their hash is not the recorded one.
    """
    parts = np.zeros(store.facts.documents, np.int32)
    ends, key = np.cumsum(weights), seed.to_bytes(8, "little", signed=True)
    whole = hashlib.sha256()
    for first, first_token, counts, lengths in _windows(store):
        bounds = _bounds(first_token, counts, lengths)
        draws = np.zeros(len(counts), np.uint64)
        for number in range(len(counts)):
            stored = np.asarray(store.tokens[bounds[number] : bounds[number + 1]])
            whole.update(stored.data)
            ids = stored.astype("<u4")
            draws[number] = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8, key=key).digest(), "little")
        share = (draws % np.uint64(ends[-1])).astype(np.int64)
        parts[first : first + len(counts)] = np.searchsorted(ends, share, side="right")
    check_hash(store.folder / "tokens.bin", store.facts.files["tokens.bin"], whole)
    return parts

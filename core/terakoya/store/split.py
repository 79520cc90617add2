"""One store becomes several, by document: what a document holds decides which, so copies never end up on two sides.

Letters: D documents, n sequences of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from terakoya.errors import UserError
from terakoya.store.assembly import Bits, Totals, assemble, new_store_folder
from terakoya.store.recorded_hashes import check_digest, check_recorded
from terakoya.store.token_store import StoreFacts, TokenStore

_DOCUMENTS, _TOKENS = 1 << 14, 1 << 20
"""Documents of a window and tokens of a chunk."""


def split(folder: Path, outs: Sequence[Path], *, weights: Sequence[int], seed: int = 0) -> list[StoreFacts]:
    """Shares the documents of the store in `folder` among the new stores `outs`, about as `weights` are to each other.

    A document's share is drawn from a hash of its ids and `seed`: the same document always goes to the same side, in
    whichever store it is. Order is kept. Raises UserError where counts do not fit, an out folder holds anything, a
    share gets no document, or a file of the store is not what its `store.json` recorded.
    """
    if len(outs) != len(weights) or len(outs) < 2:
        raise UserError(f"--parts: expected one weight for each --out, two or more, got {len(weights)} for {len(outs)}")
    if min(weights) < 1:
        raise UserError(f"--parts: expected weights of at least 1, got {', '.join(map(str, weights))}")
    if len({Path(out).resolve() for out in outs}) < len(outs):
        raise UserError("--out: expected a folder of its own for each part, got one twice")
    store = TokenStore.open(Path(folder))
    bits = {"tokens.words": store.facts.word_starts, "tokens.answers": store.facts.answers}
    check_recorded(store, "tokens.idx", *(name for name, stored in bits.items() if stored))
    sides = _sides(store, weights, seed)
    counts = np.bincount(sides, minlength=len(weights))
    for number, count in enumerate(counts):
        if not count:
            raise UserError(
                f"{folder}: expected documents for every part, part {number + 1} of {','.join(map(str, weights))} gets "
                f"none of {len(sides):,}; give it a larger weight"
            )
    tokenizer = store.tokenizer_folder
    facts = []
    with ExitStack() as stack:
        folders = [stack.enter_context(new_store_folder(out)) for out in outs]
        for number, part in enumerate(folders):
            name = f"part {number + 1} of {','.join(map(str, weights))}, seed {seed}"
            facts.append(
                assemble(
                    part,
                    Side.of(store, sides == number),
                    vocabulary=store.facts.vocabulary,
                    unit=store.facts.unit,
                    eos=store.facts.eos,
                    tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
                    inputs={**store.facts.inputs, "split": f"{name} of {store.fingerprint}"},
                    options={**store.facts.options, "split": name},
                )
            )
    return facts


@dataclass(frozen=True)
class Side:
    """The documents `kept` (D,) of a store as the content of a store."""

    store: TokenStore
    kept: np.ndarray
    totals: Totals

    @classmethod
    def of(cls, store: TokenStore, kept: np.ndarray) -> Self:
        """Counts the documents. Rejects, literal special tokens and notes stay with the whole store, whose they are."""
        side = cls(store, kept, Totals(word_starts=store.facts.word_starts, answers=store.facts.answers))
        for start, stop in side._tokens():
            side.totals.tokens += stop - start
        for counts in side.documents():
            side.totals.documents += len(counts)
            side.totals.sequences += int(counts.sum())
        return side

    def ids(self) -> Iterator[np.ndarray]:
        """Their ids."""
        for start, stop in self._tokens():
            yield np.asarray(self.store.tokens[start:stop])

    def lengths(self) -> Iterator[np.ndarray]:
        """Tokens of each sequence."""
        for first, _, counts, lengths in _windows(self.store):
            yield lengths[np.repeat(self.kept[first : first + len(counts)], counts)]

    def documents(self) -> Iterator[np.ndarray]:
        """Sequences of each document."""
        for first, _, counts, _ in _windows(self.store):
            yield counts[self.kept[first : first + len(counts)]]

    def words(self) -> Iterator[Bits]:
        """Which tokens start a word."""
        for start, stop in self._tokens():
            yield np.packbits(self.store.word_starts(start, stop), bitorder="little"), stop - start

    def answers(self) -> Iterator[Bits]:
        """Which tokens belong to answers."""
        for start, stop in self._tokens():
            yield np.packbits(self.store.answers(start, stop), bitorder="little"), stop - start

    def rejects(self) -> Iterator[bytes]:
        """None."""
        return iter(())

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """Where kept tokens lie: adjacent documents at once, by at most so many tokens."""
        for first, place, counts, lengths in _windows(self.store):
            bounds = _bounds(place, counts, lengths)
            kept = np.concatenate([[False], self.kept[first : first + len(counts)], [False]])
            for begin, end in np.flatnonzero(kept[1:] != kept[:-1]).reshape(-1, 2):
                for start in range(int(bounds[begin]), int(bounds[end]), _TOKENS):
                    yield start, min(start + _TOKENS, int(bounds[end]))


def _windows(store: TokenStore) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """The first document, where its tokens begin, sequences of each document and tokens of each sequence (n,)."""
    place = 0
    for first in range(0, store.facts.documents, _DOCUMENTS):
        ends = np.asarray(store.documents[first : first + _DOCUMENTS + 1])
        lengths = np.asarray(store.index.lengths[ends[0] : ends[-1]])
        yield first, place, np.diff(ends), lengths
        place += int(lengths.sum(dtype=np.int64))


def _bounds(place: int, counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Where each document of a window begins in the tokens, and where the last one ends."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return place + ends[np.concatenate([[0], np.cumsum(counts)])]


def _sides(store: TokenStore, weights: Sequence[int], seed: int) -> np.ndarray:
    """(D,) int32, the part of each document: its hash modulo the sum of the weights, counted off.

    The index is taken to be sound. Raises UserError if the ids, all of which are read, are not what was recorded.
    """
    sides = np.zeros(store.facts.documents, np.int32)
    ends, key = np.cumsum(weights), seed.to_bytes(8, "little", signed=True)
    whole = hashlib.sha256()
    for first, place, counts, lengths in _windows(store):
        bounds = _bounds(place, counts, lengths)
        draws = np.zeros(len(counts), np.uint64)
        for number in range(len(counts)):
            stored = np.asarray(store.tokens[bounds[number] : bounds[number + 1]])
            whole.update(stored.data)
            ids = stored.astype("<u4")
            draws[number] = int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8, key=key).digest(), "little")
        share = (draws % np.uint64(ends[-1])).astype(np.int64)
        sides[first : first + len(counts)] = np.searchsorted(ends, share, side="right")
    check_digest(store, "tokens.bin", whole.hexdigest())
    return sides

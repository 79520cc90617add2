"""Some documents of a token store as a store of their own: one store serves training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from terakoya.store.token_store import Index, TokenStore


@dataclass(frozen=True)
class StoreSubset(TokenStore):
    """The documents [first, stop) of the store `whole`; nothing is copied. `select_documents` creates it."""

    whole: TokenStore
    first: int
    stop: int

    def __reduce__(self) -> tuple[object, ...]:
        return select_documents, (self.whole, self.first, self.stop)

    @property
    def local_folder(self) -> Path:
        return self.whole.local_folder

    @cached_property
    def first_sequence(self) -> int:
        """Number of the first sequence in `whole`."""
        return int(self.whole.first_sequences(np.array([self.first]))[0])

    @cached_property
    def first_token(self) -> int:
        """Position of the first token in the tokens of `whole`."""
        return int(self.whole.sequence_starts(np.array([self.first_sequence]))[0])

    @property
    def tokens(self) -> np.ndarray:
        """All ids (T,), in the stored type."""
        return self.whole.tokens[self.first_token : self.first_token + self.facts.tokens]

    def reading(self) -> AbstractContextManager[None]:
        return self.whole.reading()

    def touch(self, start: np.ndarray, length: np.ndarray | int) -> None:
        self.whole.touch(start + self.first_token, length)

    def sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        return self.whole.sequence_starts(sequences + self.first_sequence) - self.first_token

    def first_sequences(self, documents: np.ndarray) -> np.ndarray:
        return self.whole.first_sequences(documents + self.first) - self.first_sequence

    def document_starts(self, documents: np.ndarray, *, check: bool = True) -> np.ndarray:
        return self.whole.document_starts(documents + self.first, check=check) - self.first_token

    @cached_property
    def sizes(self) -> np.ndarray:
        return self.whole.sizes[self.first : self.stop]

    def flag_bits(self, name: str) -> tuple[np.ndarray, int]:
        packed, skipped = self.whole.flag_bits(name)
        return packed[(skipped + self.first_token) // 8 :], (skipped + self.first_token) % 8


def select_documents(whole: TokenStore, first: int, stop: int) -> StoreSubset:
    """Returns the documents [first, stop) of `whole`. Their row plans are stored in the folder of `whole`."""
    assert 0 <= first < stop <= whole.facts.documents
    begin, end = whole.first_sequences(np.array([first, stop])).tolist()
    first_token, end_token = whole.sequence_starts(np.array([begin, end])).tolist()
    index = Index(
        dtype=whole.index.dtype,
        lengths=whole.index.lengths[begin:end],
        pointers=whole.index.pointers[begin:end],
        documents=whole.index.documents[first : stop + 1] - begin,
    )
    facts = whole.facts.model_copy(
        update={
            "documents": stop - first,
            "sequences": end - begin,
            "tokens": end_token - first_token,
            "fingerprint": hashlib.sha256(f"{whole.fingerprint}:{first}:{stop}".encode()).hexdigest(),
        }
    )
    return StoreSubset(whole.folder, facts, index, whole, first, stop)


def document_ranges(documents: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Returns the documents [first, stop) of each of `shares`, contiguous and in order; `shares` need not add up to 1.

    Each bound is the rounded product of `documents` and the shares up to there, as in Megatron-Core.
    """
    total = sum(shares)
    bounds = [0, *(round(documents * (share / total)) for share in accumulate(shares))]
    return list(pairwise(bounds))

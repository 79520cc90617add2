"""Some documents of a token store as a store of their own: one store serves training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    def first_token(self) -> int:
        """Position of the first token in the tokens of `whole`."""
        return int(self.whole.offsets[self.whole.documents[self.first]])

    @property
    def tokens(self) -> np.ndarray:
        """All ids (T,), in the stored type."""
        return self.whole.tokens[self.first_token : self.first_token + self.facts.tokens]

    @property
    def word_bits(self) -> tuple[np.ndarray, int]:
        """As `TokenStore.word_bits`."""
        return self._shift(self.whole.word_bits)

    @property
    def answer_bits(self) -> tuple[np.ndarray, int]:
        """As `TokenStore.answer_bits`."""
        return self._shift(self.whole.answer_bits)

    def _shift(self, bits: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
        """Returns `bits` of `whole` from the first token of this subset on."""
        packed, skipped = bits
        return packed[(skipped + self.first_token) // 8 :], (skipped + self.first_token) % 8


def select_documents(whole: TokenStore, first: int, stop: int) -> StoreSubset:
    """Returns the documents [first, stop) of `whole`. Their row plans are stored in the folder of `whole`."""
    assert 0 <= first < stop <= whole.facts.documents
    begin, end = int(whole.documents[first]), int(whole.documents[stop])
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
            "tokens": int(whole.offsets[end] - whole.offsets[begin]),
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

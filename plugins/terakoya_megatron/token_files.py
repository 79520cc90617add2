"""Reads and checks token files of Megatron-LM, its relatives and GPT-NeoX: `PREFIX.bin` and `PREFIX.idx`.

Some preprocessors write an end-of-document id into `.bin` after each
document but omit it from the lengths in `.idx`: document n then begins n tokens too early, and the last tokens are
never read. The sums of the lengths distinguish such files from damaged ones, and they are read with correct lengths.

Letters: T tokens, n sequences and d documents of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

import numpy as np

from terakoya.errors import UserError
from terakoya.store.token_store import Index

Suffix = Literal["bin", "idx"]
REMEDY = "make the files again"
_DOCUMENTS, _SEQUENCES = 1 << 16, 1 << 20
"""Documents and sequences in one chunk."""


@dataclass(frozen=True)
class MegatronFiles:
    """A pair of files that belong together.

    Attributes:
        prefix: the files are `prefix`.bin and `prefix`.idx.
        omits_document_ends: whether the lengths omit one end-of-document id for each document that has a sequence.
        has_sentences: whether a document has more than one sequence.
        empty: sequences without a token and documents without a sequence; a store has neither.
    """

    prefix: Path
    index: Index
    omits_document_ends: bool
    has_sentences: bool
    empty: tuple[int, int]

    @classmethod
    def open(cls, prefix: Path) -> Self:
        """Opens the files of `prefix`, which may also be the path of one of them.

        Reads the whole index and no tokens. Raises UserError if the files are missing, truncated, of different data
        sets, of a type that ids do not have, or inconsistent.
        """
        prefix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
        if not prefix.name:
            raise UserError(f"{prefix}: expected the common beginning of two files, PREFIX.bin and PREFIX.idx")
        idx, bin_file = (prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("idx", "bin"))
        index = Index.open(idx, remedy=f"{REMEDY} (multimodal files are not read)")
        if index.dtype.kind == "f":
            raise UserError(f"{idx}: expected ids of an integer type, got {index.dtype}; these are not tokens")
        if not bin_file.is_file():
            raise UserError(f"{bin_file}: no such file; expected the tokens that {idx.name} describes")
        tokens, empty_sequences = _check_sequences(idx, index)
        documents, empty_documents, has_sentences = _check_documents(idx, index)
        size = bin_file.stat().st_size
        extra = size - tokens * index.dtype.itemsize
        if extra and extra != documents * index.dtype.itemsize:
            what = "it is truncated" if extra < 0 else "not the file of this index"
            raise UserError(
                f"{bin_file}: expected {tokens * index.dtype.itemsize:,} bytes for {tokens:,} ids of type "
                f"{index.dtype} as {idx.name} says, got {size:,}: {what}; {REMEDY}"
            )
        if not size:
            raise UserError(f"{bin_file}: expected at least one token, got an empty file")
        return cls(prefix, index, bool(extra), has_sentences, (empty_sequences, empty_documents))

    def file(self, suffix: Suffix) -> Path:
        """Returns the path of one of the two files."""
        return self.prefix.with_name(f"{self.prefix.name}.{suffix}")

    @cached_property
    def tokens(self) -> np.ndarray:
        """All ids (T,), in the stored type."""
        return np.memmap(self.file("bin"), self.index.dtype, "r")

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields, some documents at a time, the lengths of sequences (n,) and the number of sequences of each document
        (d,), with omitted document ends added and without empty sequences and documents."""
        bounds = self.index.documents
        for first in range(0, len(bounds) - 1, _DOCUMENTS):
            ends = np.asarray(bounds[first : first + _DOCUMENTS + 1])
            lengths = self.index.lengths[ends[0] : ends[-1]].astype(np.int64)
            counts = np.diff(ends)
            if self.omits_document_ends:
                lengths[(ends[1:] - ends[0] - 1)[counts > 0]] += 1
            full = np.concatenate([[0], np.cumsum(lengths > 0)])
            counts = np.diff(full[ends - ends[0]])
            yield lengths[lengths > 0], counts[counts > 0]

    def last_ids(self, *, most: int | None = None) -> Iterator[np.ndarray]:
        """Yields the last id of each document, some at a time, of at most about `most` documents."""
        end = seen = 0
        for lengths, counts in self.chunks():
            ends = end + np.cumsum(lengths)
            end = int(ends[-1]) if len(ends) else end
            at = ends[np.cumsum(counts) - 1] - 1
            yield np.asarray(self.tokens[at if most is None else at[: most - seen]])
            seen += len(at)
            if most is not None and seen >= most:
                return


# ------------------------------------------------------------------------------------------------------------ checks


def _check_sequences(idx: Path, index: Index) -> tuple[int, int]:
    """Returns the sum of all lengths and how many are 0. Raises UserError if lengths and byte positions disagree."""
    tokens = empty = 0
    for start in range(0, len(index.lengths), _SEQUENCES):
        lengths = index.lengths[start : start + _SEQUENCES]
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        starts = np.concatenate([[tokens], ends[:-1]]) * index.dtype.itemsize
        if int(lengths.min()) < 0 or not np.array_equal(starts, index.pointers[start : start + _SEQUENCES]):
            raise UserError(
                f"{idx}: lengths and byte positions disagree in sequences {start:,} to {start + len(lengths):,}: "
                f"damaged; {REMEDY}"
            )
        tokens, empty = int(ends[-1]), empty + int(np.count_nonzero(lengths == 0))
    return tokens, empty


def _check_documents(idx: Path, index: Index) -> tuple[int, int, bool]:
    """Returns how many documents have a sequence, how many have none, and whether one has several. Raises UserError if
    the documents are not in order."""
    bounds, full, empty, several = index.documents, 0, 0, False
    in_order = bounds[0] == 0 and bounds[-1] == len(index.lengths)
    for start in range(0, len(bounds), _SEQUENCES):
        counts = np.diff(bounds[start : start + _SEQUENCES + 1])
        in_order = in_order and not (counts < 0).any()
        several = several or bool((counts > 1).any())
        full, empty = full + int(np.count_nonzero(counts > 0)), empty + int(np.count_nonzero(counts == 0))
    if not in_order:
        raise UserError(
            f"{idx}: expected document entries that rise from 0 to {len(index.lengths):,}: damaged; {REMEDY}"
        )
    return full, empty, several

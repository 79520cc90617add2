"""The parts of `prepare` as the content of a store, and a store written from ids in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from terakoya.components import EncodedDocuments
from terakoya.errors import UserError
from terakoya.store.assembly import Bits, StoreHead, assemble_store, new_store_folder
from terakoya.store.document_sizes import SIZES
from terakoya.store.parts import PartBuilder, PartFacts, read_part, read_section
from terakoya.store.token_store import PARTS, Counts, TokenStore

_PART_TOKENS = 1 << 22


@dataclass(frozen=True)
class PartsContent:
    """The first `parts` parts of the unfinished store `folder`, as a `StoreContent`."""

    folder: Path
    parts: int
    totals: Counts

    def ids(self) -> Iterator[bytes]:
        return self._section("ids")

    def lengths(self) -> Iterator[np.ndarray]:
        return (np.frombuffer(chunk, "<i4") for chunk in self._section("lengths"))

    def documents(self) -> Iterator[np.ndarray]:
        return (np.frombuffer(chunk, "<i4") for chunk in self._section("documents"))

    def flags(self, name: str) -> Iterator[Bits]:
        for number, facts in self._facts():
            remaining = facts.counts.tokens
            for chunk in read_section(self.folder / PARTS, number, facts, name):
                count = min(remaining, 8 * len(chunk))
                remaining -= count
                yield chunk, count

    def sizes(self) -> Iterator[np.ndarray]:
        return (np.frombuffer(chunk, SIZES).reshape(-1, 2) for chunk in self._section("sizes"))

    def rejects(self) -> Iterator[bytes]:
        return self._section("rejects")

    def _section(self, name: str) -> Iterator[bytes]:
        for number, facts in self._facts():
            yield from read_section(self.folder / PARTS, number, facts, name)

    def _facts(self) -> Iterator[tuple[int, PartFacts]]:
        for number in range(self.parts):
            facts = read_part(self.folder / PARTS, number, check=False)
            if facts is None:
                raise UserError(
                    f"{self.folder / PARTS}: part {number} was removed or changed while it was in use; "
                    "run the command again"
                )
            yield number, facts


def write_store(
    folder: Path,
    documents: Iterable[Sequence[Sequence[int] | np.ndarray]],
    *,
    word_starts: Iterable[Sequence[Sequence[bool] | np.ndarray]] | None = None,
    answers: Iterable[Sequence[Sequence[bool] | np.ndarray]] | None = None,
    **head: Any,
) -> TokenStore:
    """Writes the store `folder` from ids; the folder appears when the store is complete.

    Each document is the ids of its lines; `word_starts` and `answers`, if given, have the same shape. `head` are the
    fields of `StoreHead`, of which `vocabulary` is required. Raises UserError if `folder` is not empty, or for ids
    outside the vocabulary.
    """
    folder, made = Path(folder), StoreHead(**head)
    totals, parts = Counts(), 0
    flags = iter(word_starts) if word_starts is not None else None
    answer_flags = iter(answers) if answers is not None else None
    with new_store_folder(folder) as staging:
        builder = PartBuilder(made.vocabulary, made.unit, made.eos)
        for document in documents:
            lines = [np.asarray(line) for line in document if len(line)]
            words = None if flags is None else _concatenate(next(flags), bool)
            encoded = EncodedDocuments(
                ids=_concatenate(lines, np.int64),
                line_lengths=np.array([len(line) for line in lines], dtype=np.int32),
                document_lines=np.array([len(lines)], dtype=np.int32),
                word_starts=words,
                learned=None if answer_flags is None else _concatenate(next(answer_flags), bool),
            )
            builder.add(encoded)
            if builder.tokens >= _PART_TOKENS:
                totals, parts = totals + builder.write(staging / PARTS, parts, "").counts, parts + 1
                builder = PartBuilder(made.vocabulary, made.unit, made.eos)
        totals += builder.write(staging / PARTS, parts, "").counts
        if not totals.tokens:
            raise UserError(f"{folder}: expected at least one token, got none")
        assemble_store(staging, PartsContent(staging, parts + 1, totals), made)
    return TokenStore.open(folder)


def _concatenate(lines: Sequence[Sequence[int] | Sequence[bool] | np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(line, dtype) for line in lines if len(line))])

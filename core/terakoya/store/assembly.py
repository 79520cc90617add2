"""Streams the content of a store into its files; only one chunk at a time is in memory.

A `StoreContent` knows its sums in advance and can be read repeatedly: the parts of `prepare`, several stores to merge,
some documents of a store, or the files of another program.

See docs/design/store-assembly.md.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from terakoya.atomic_files import FileFacts, commit_folder, dump_hashed_json, new_folder, write_atomically
from terakoya.components.vocabulary import Vocabulary
from terakoya.store.block_checksums import BlockChecksums
from terakoya.store.document_sizes import FILE as SIZES_FILE
from terakoya.store.file_hashes import TOKENIZER
from terakoya.store.parts import PartFacts
from terakoya.store.token_store import (
    CHECKSUMS,
    DTYPE_CODES,
    IDX_HEADER,
    IDX_MAGIC,
    PARTS,
    StoreFacts,
    Unit,
    content_fingerprint,
)
from terakoya.toolkit.formats.model_files import belongs_to_model

Options = Mapping[str, str | int | bool | None]
Bits = tuple[np.ndarray | bytes, int]
"""Flags, eight in a byte, least significant first, and their number."""


@dataclass
class Totals:
    """Sums over a content, or over the parts that were added so far."""

    parts: int = 0
    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    literals: Counter[str] = field(default_factory=Counter)
    word_starts: bool = True
    answers: bool = True
    sizes: bool = True
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, facts: PartFacts | StoreFacts) -> None:
        """Adds the counts of one more part or store."""
        self.parts += 1
        self.tokens += facts.tokens
        self.sequences += facts.sequences
        self.documents += facts.documents
        self.rejected.update(facts.rejected if isinstance(facts, PartFacts) else facts.rejected_by_reason)
        self.literals.update(facts.literals)
        self.notes.update(facts.notes)
        if facts.tokens:
            self.word_starts &= facts.word_starts
            self.answers &= facts.answers
            self.sizes &= facts.sizes


class StoreContent(Protocol):
    """Documents as arrays, in order, in chunks of any size; every method may be called more than once."""

    @property
    def totals(self) -> Totals:
        """Sums of what the other methods yield."""

    def ids(self) -> Iterator[np.ndarray | bytes]:
        """Yields all ids, little-endian, in the vocabulary's type."""

    def lengths(self) -> Iterator[np.ndarray]:
        """Yields the number of tokens of each sequence, at least 1."""

    def documents(self) -> Iterator[np.ndarray]:
        """Yields the number of sequences of each document, at least 1."""

    def words(self) -> Iterator[Bits]:
        """Yields which tokens start a word; called only if `totals.word_starts`."""

    def answers(self) -> Iterator[Bits]:
        """Yields which tokens belong to answers; called only if `totals.answers`."""

    def sizes(self) -> Iterator[np.ndarray]:
        """Yields the characters and bytes of each document's text, (n, 2); called only if `totals.sizes`."""

    def rejects(self) -> Iterator[bytes]:
        """Yields lines of `rejects.jsonl`; called only if `totals.rejected` is not empty."""


def assemble_store(
    folder: Path,
    content: StoreContent,
    *,
    vocabulary: Vocabulary,
    unit: Unit,
    eos: int | None,
    tokenizer_folder: Path | None,
    inputs: Mapping[str, str],
    options: Options,
    tokenizer_files: Mapping[str, str] | None = None,
) -> StoreFacts:
    """Writes the store `folder` from `content`, `store.json` last, and then removes the folder's `.parts`.

    The store's copy of the tokenizer gets `tokenizer_files`, texts by name, if given.
    """
    parts, totals = folder / PARTS, content.totals
    chunks: dict[str, Iterator[np.ndarray | bytes]] = {
        "tokens.bin": content.ids(),
        "tokens.idx": _index(content, vocabulary),
    }
    if totals.word_starts:
        chunks["tokens.words"] = _join_bits(content.words())
    if totals.answers:
        chunks["tokens.answers"] = _join_bits(content.answers())
    files, checksums = {}, []
    for name, data in chunks.items():
        blocks = BlockChecksums()
        files[name] = _write(folder, name, data, blocks)
        checksums.append(blocks.values())
    fingerprint = content_fingerprint(unit, eos, vocabulary, files)
    files[CHECKSUMS] = _write(folder, CHECKSUMS, checksums)
    if totals.sizes:
        files[SIZES_FILE] = _write(folder, SIZES_FILE, content.sizes())
    if totals.rejected:
        files["rejects.jsonl"] = write_rejects(folder, content)
    if tokenizer_folder is not None:
        files |= _copy_tokenizer(tokenizer_folder, folder, tokenizer_files or {})
    facts = StoreFacts(
        unit=unit,
        eos=eos,
        documents=totals.documents,
        sequences=totals.sequences,
        tokens=totals.tokens,
        rejected=totals.rejected.total(),
        rejected_by_reason=dict(sorted(totals.rejected.items())),
        literals=dict(sorted(totals.literals.items())),
        notes=dict(sorted(totals.notes.items())),
        dtype="uint16" if vocabulary.dtype() == np.uint16 else "int32",
        vocabulary=vocabulary,
        word_starts=totals.word_starts,
        answers=totals.answers,
        fingerprint=fingerprint,
        inputs=dict(inputs),
        options=dict(options),
        files=files,
    )
    with write_atomically(folder / "store.json", draft_folder=parts) as out:
        out.write(dump_hashed_json(facts.model_dump(mode="json")))
    shutil.rmtree(parts)
    return facts


@contextmanager
def new_store_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to assemble the store `out` in. It becomes `out` if the block succeeds, else it is removed.

    Raises UserError if `out` is not empty.
    """
    with new_folder(Path(out)) as draft:
        (draft / PARTS).mkdir()
        yield draft


def write_rejects(folder: Path, content: StoreContent) -> FileFacts:
    """Writes `rejects.jsonl`: file, line, reason and excerpt of each rejected document, in order."""
    return _write(folder, "rejects.jsonl", content.rejects())


def _write(
    folder: Path, name: str, chunks: Iterable[np.ndarray | bytes], checksums: BlockChecksums | None = None
) -> FileFacts:
    """Writes the file `name` and computes its `checksums`, if given."""
    with write_atomically(folder / name, draft_folder=folder / PARTS) as out:
        for chunk in chunks:
            out.write(chunk)
            if checksums is not None:
                checksums.add(chunk)
    return out.facts()


def _index(content: StoreContent, vocabulary: Vocabulary) -> Iterator[np.ndarray | bytes]:
    """Yields the content of tokens.idx."""
    dtype, totals = vocabulary.dtype(), content.totals
    code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)
    yield IDX_HEADER.pack(IDX_MAGIC, 1, code, totals.sequences, totals.documents + 1)
    for chunk in content.lengths():
        yield chunk.astype("<i4")
    position = 0
    for chunk in content.lengths():
        starts, position = _starts(position, chunk)
        yield starts * dtype.itemsize
    first = 0
    for chunk in content.documents():
        starts, first = _starts(first, chunk)
        yield starts
    yield np.array([first], dtype="<i8")
    assert position == totals.tokens and first == totals.sequences, "the content does not add up to its totals"


def _starts(first: int, sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns where items of these `sizes` begin, (n,) int64, the first at `first`, and where the last one ends."""
    ends = first + np.cumsum(sizes, dtype="<i8")
    return np.concatenate([[first], ends])[:-1].astype("<i8"), int(ends[-1]) if len(ends) else first


def _join_bits(flags: Iterator[Bits]) -> Iterator[np.ndarray]:
    """Yields the flags as whole bytes."""
    remaining = np.zeros(0, dtype=np.uint8)  # the bits of a byte that spans two chunks
    for packed, count in flags:
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little")
        bits = np.concatenate([remaining, bits])
        whole = len(bits) // 8 * 8
        yield np.packbits(bits[:whole], bitorder="little")
        remaining = bits[whole:]
    yield np.packbits(remaining, bitorder="little")


def _copy_tokenizer(source: Path, folder: Path, more: Mapping[str, str]) -> dict[str, FileFacts]:
    """Copies the tokenizer, without a model that is in its folder. Returns the facts of its files, by their paths in
    `folder`."""
    draft, target = folder / PARTS / TOKENIZER, folder / TOKENIZER
    for old in (draft, target):
        if old.exists():
            shutil.rmtree(old)
    for file in sorted(source.rglob("*")):
        hidden = any(name.startswith(".") for name in file.relative_to(source).parts)
        if file.is_file() and not hidden and not belongs_to_model(file):
            copy = draft / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    for name, text in more.items():
        (draft / name).write_text(text, encoding="utf-8")
    commit_folder(draft, target)
    files = sorted(file for file in target.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): FileFacts.of(file) for file in files}

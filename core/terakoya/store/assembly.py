"""Streams the content of a store into its files; only one chunk at a time is in memory.

A `StoreContent` knows its sums in advance and can be read repeatedly: the parts of `prepare`, several stores to merge,
some documents of a store, or the files of another program.

See docs/design/store-assembly.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from terakoya.atomic_files import FileFacts, commit_folder, dump_hashed_json, new_folder, write_atomically
from terakoya.components.vocabulary import Vocabulary
from terakoya.store.block_checksums import BlockChecksums
from terakoya.store.document_sizes import FILE as SIZES_FILE
from terakoya.store.file_hashes import TOKENIZER
from terakoya.store.token_store import (
    CHECKSUMS,
    DTYPE_CODES,
    IDX_HEADER,
    IDX_MAGIC,
    LEARNED,
    PARTS,
    SIZES_KNOWN,
    WORDS,
    Counts,
    StoreFacts,
    TokenStore,
    Unit,
    content_fingerprint,
)
from terakoya.toolkit.formats.model_files import belongs_to_model

Options = Mapping[str, str | int | bool | None]
Bits = tuple[np.ndarray | bytes, int]
"""Flags, eight in a byte, least significant first, and their number."""


@dataclass(frozen=True)
class StoreHead:
    """What a store records beside its content.

    Attributes:
        tokenizer_folder: whose copy it gets, with the texts `tokenizer_files` by name; None: none.
        inputs: hashes of what it is made from.
    """

    vocabulary: Vocabulary
    unit: Unit = "document"
    eos: int | None = None
    tokenizer_folder: Path | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, store: TokenStore, *, inputs: Mapping[str, str], options: Options) -> Self:
        """Returns that of `store` with other `inputs` and `options`."""
        facts, folder = store.facts, store.tokenizer_folder
        return cls(facts.vocabulary, facts.unit, facts.eos, folder if folder.is_dir() else None, inputs, options)


class StoreContent(Protocol):
    """Documents as arrays, in order, in chunks of any size; every method may be called more than once."""

    @property
    def totals(self) -> Counts:
        """Sums of what the other methods yield."""

    def ids(self) -> Iterator[np.ndarray | bytes]:
        """Yields all ids, little-endian, in the vocabulary's type."""

    def lengths(self) -> Iterator[np.ndarray]:
        """Yields the number of tokens of each sequence, at least 1."""

    def documents(self) -> Iterator[np.ndarray]:
        """Yields the number of sequences of each document, at least 1."""

    def flags(self, name: str) -> Iterator[Bits]:
        """Yields which tokens start a word (`WORDS`) or are learned (`LEARNED`); called only if `totals` has it."""

    def sizes(self) -> Iterator[np.ndarray]:
        """Yields the characters and bytes of each document's text, (n, 2); called only if `totals` has them."""

    def rejects(self) -> Iterator[bytes]:
        """Yields lines of `rejects.jsonl`; called only if `totals.rejected` is not empty."""


def assemble_store(folder: Path, content: StoreContent, head: StoreHead) -> StoreFacts:
    """Writes the store `folder` from `content`, `store.json` last, and then removes the folder's `.parts`."""
    parts, totals, vocabulary = folder / PARTS, content.totals, head.vocabulary
    chunks: dict[str, Iterator[np.ndarray | bytes]] = {
        "tokens.bin": content.ids(),
        "tokens.idx": _index(content, vocabulary),
    }
    chunks |= {f"tokens.{name}": _join_bits(content.flags(name)) for name in (WORDS, LEARNED) if name in totals.known}
    files, checksums = {}, []
    for name, data in chunks.items():
        blocks = BlockChecksums()
        files[name] = _write(folder, name, data, blocks)
        checksums.append(blocks.values())
    fingerprint = content_fingerprint(head.unit, head.eos, vocabulary, files)
    files[CHECKSUMS] = _write(folder, CHECKSUMS, checksums)
    if SIZES_KNOWN in totals.known:
        files[SIZES_FILE] = _write(folder, SIZES_FILE, content.sizes())
    if totals.rejected:
        files["rejects.jsonl"] = write_rejects(folder, content)
    if head.tokenizer_folder is not None:
        files |= _copy_tokenizer(head.tokenizer_folder, folder, head.tokenizer_files)
    facts = StoreFacts.of(
        totals,
        unit=head.unit,
        eos=head.eos,
        dtype="uint16" if vocabulary.dtype() == np.uint16 else "int32",
        vocabulary=vocabulary,
        fingerprint=fingerprint,
        inputs=dict(head.inputs),
        options=dict(head.options),
        files=files,
    )
    with write_atomically(folder / "store.json", draft_folder=parts) as out:
        out.write(dump_hashed_json(facts.model_dump(mode="json")))
    shutil.rmtree(parts)
    return facts


@contextmanager
def new_store_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to assemble the store `out` in. It becomes `out` if the block succeeds, else it is removed.
    Raises UserError if `out` is not empty."""
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

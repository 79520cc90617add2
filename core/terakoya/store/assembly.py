"""Streams the content of a store into its files; only one chunk at a time is in memory.

A `StoreContent` knows its sums in advance and can be read repeatedly: the parts of `prepare`, several stores to merge,
some documents of a store, or the files of another program.

See docs/design/store-assembly.md.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from terakoya.atomic_files import FileFacts, sync_folder, write_atomically
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.store.parts import PartFacts
from terakoya.store.token_store import DTYPE_CODES, IDX_HEADER, IDX_MAGIC, PARTS, StoreFacts, Unit

_NOT_TOKENIZER = (
    "*.safetensors",
    "pytorch_model*.bin",
    "tf_model*",
    "flax_model*",
    "*.ckpt",
    "*.pt",
    "*.pth",
    "*.gguf",
)
"""Model weights, which may be in a tokenizer's folder and are not copied with it."""

CHAT_TEMPLATE = "chat_template.jinja"
"""The file in a tokenizer's folder that Transformers reads the chat template from first."""

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
    chat_template: str | None = None,
) -> StoreFacts:
    """Writes the store `folder` from `content`, `store.json` last, and then removes the folder's `.parts`.

    The store's copy of the tokenizer gets `chat_template`, if given.
    """
    parts, totals = folder / PARTS, content.totals
    files = {"tokens.bin": _write_ids(folder, content), "tokens.idx": _write_index(folder, content, vocabulary)}
    if totals.word_starts:
        files["tokens.words"] = _write_bits(folder, "tokens.words", content.words())
    if totals.answers:
        files["tokens.answers"] = _write_bits(folder, "tokens.answers", content.answers())
    if totals.rejected:
        write_rejects(folder, content)
    if tokenizer_folder is not None:
        _copy_tokenizer(tokenizer_folder, folder, chat_template)
    hashes = {name: facts.sha256 for name, facts in files.items()}
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
        dtype=vocabulary.dtype().name,
        vocabulary=vocabulary,
        word_starts=totals.word_starts,
        answers=totals.answers,
        fingerprint=hashlib.sha256(orjson.dumps([unit, eos, vocabulary.model_dump(), hashes])).hexdigest(),
        inputs=dict(inputs),
        options=dict(options),
        files=files,
    )
    with write_atomically(folder / "store.json", draft_folder=parts) as out:
        out.write(facts.model_dump_json(indent=2).encode() + b"\n")
    shutil.rmtree(parts)
    return facts


@contextmanager
def new_store_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to assemble the store `out` in. It becomes `out` if the block succeeds, else it is removed.

    Raises UserError if `out` is not empty.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: expected a new or empty folder, got one that holds files; choose another --out")
    staging = out.with_name(f".{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)  # left by a process that was killed
    (staging / PARTS).mkdir(parents=True)
    try:
        yield staging
        if out.exists():
            out.rmdir()
        staging.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_rejects(folder: Path, content: StoreContent) -> None:
    """Writes `rejects.jsonl`: file, line, reason and excerpt of each rejected document, in order."""
    with write_atomically(folder / "rejects.jsonl", draft_folder=folder / PARTS) as out:
        for chunk in content.rejects():
            out.write(chunk)


def _write_ids(folder: Path, content: StoreContent) -> FileFacts:
    with write_atomically(folder / "tokens.bin", draft_folder=folder / PARTS) as out:
        for chunk in content.ids():
            out.write(chunk)
    return out.facts()


def _write_index(folder: Path, content: StoreContent, vocabulary: Vocabulary) -> FileFacts:
    dtype, totals = vocabulary.dtype(), content.totals
    code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)
    with write_atomically(folder / "tokens.idx", draft_folder=folder / PARTS) as out:
        out.write(IDX_HEADER.pack(IDX_MAGIC, 1, code, totals.sequences, totals.documents + 1))
        for chunk in content.lengths():
            out.write(chunk.astype("<i4"))
        position = 0
        for chunk in content.lengths():
            starts, position = _starts(position, chunk)
            out.write(starts * dtype.itemsize)
        first = 0
        for chunk in content.documents():
            starts, first = _starts(first, chunk)
            out.write(starts)
        out.write(np.array([first], dtype="<i8"))
    assert position == totals.tokens and first == totals.sequences, "the content does not add up to its totals"
    return out.facts()


def _starts(first: int, sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns where items of these `sizes` begin, (n,) int64, the first at `first`, and where the last one ends."""
    ends = first + np.cumsum(sizes, dtype="<i8")
    return np.concatenate([[first], ends])[:-1].astype("<i8"), int(ends[-1]) if len(ends) else first


def _write_bits(folder: Path, name: str, flags: Iterator[Bits]) -> FileFacts:
    remaining = np.zeros(0, dtype=np.uint8)  # the bits of a byte that spans two chunks
    with write_atomically(folder / name, draft_folder=folder / PARTS) as out:
        for packed, count in flags:
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little")
            bits = np.concatenate([remaining, bits])
            whole = len(bits) // 8 * 8
            out.write(np.packbits(bits[:whole], bitorder="little"))
            remaining = bits[whole:]
        out.write(np.packbits(remaining, bitorder="little"))
    return out.facts()


def _copy_tokenizer(source: Path, folder: Path, chat_template: str | None) -> None:
    draft, target = folder / PARTS / "tokenizer", folder / "tokenizer"
    for old in (draft, target):
        if old.exists():
            shutil.rmtree(old)
    for file in sorted(source.rglob("*")):
        hidden = any(name.startswith(".") for name in file.relative_to(source).parts)
        if file.is_file() and not hidden and not any(file.match(pattern) for pattern in _NOT_TOKENIZER):
            copy = draft / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(copy) as out, file.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    out.write(chunk)
    if chat_template is not None:  # Transformers prefers this file to the template in tokenizer_config.json
        with write_atomically(draft / CHAT_TEMPLATE) as out:
            out.write(chat_template.encode())
    draft.rename(target)
    sync_folder(folder)

"""What a store is made of, streamed into the files of a store: nothing is held but one chunk.

A `Content` knows its sums beforehand and can be read as often as needed: the parts of `prepare`, several stores to be
merged, some documents of one, or foreign files.
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

from terakoya.atomic_files import FileFacts, committed, sync_folder
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
"""Weights, which may lie beside a tokenizer and are not copied with it."""

CHAT_TEMPLATE = "chat_template.jinja"
"""The file beside a tokenizer in which Transformers looks for its chat template first."""

Options = Mapping[str, str | int | bool | None]
Bits = tuple[np.ndarray | bytes, int]
"""Flags packed eight a byte, least significant first, and how many they are."""


@dataclass
class Totals:
    """Sums over a content, or over all parts seen so far."""

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
        """Counts one more part or store."""
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


class Content(Protocol):
    """Documents as arrays, in order, in chunks of any size; every method may be called more than once.

    `totals` are the sums of what the streams yield.
    """

    @property
    def totals(self) -> Totals:
        """The sums."""

    def ids(self) -> Iterator[np.ndarray | bytes]:
        """All ids, little-endian in the vocabulary's type."""

    def lengths(self) -> Iterator[np.ndarray]:
        """Tokens of each sequence, each at least 1."""

    def documents(self) -> Iterator[np.ndarray]:
        """Sequences of each document, each at least 1."""

    def words(self) -> Iterator[Bits]:
        """Which tokens start a word; called only where `totals.word_starts`."""

    def answers(self) -> Iterator[Bits]:
        """Which tokens belong to answers; called only where `totals.answers`."""

    def rejects(self) -> Iterator[bytes]:
        """Lines of `rejects.jsonl`; called only where `totals.rejected` holds any."""


def assemble(
    folder: Path,
    content: Content,
    *,
    vocabulary: Vocabulary,
    unit: Unit,
    eos: int | None,
    tokenizer_folder: Path | None,
    inputs: Mapping[str, str],
    options: Options,
    chat_template: str | None = None,
) -> StoreFacts:
    """Makes the store in `folder` from `content`, `store.json` last; what lies in its `.parts` goes then.

    A `chat_template` becomes that of the store's copy of the tokenizer.
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
    with committed(folder / "store.json", beside=parts) as out:
        out.write(facts.model_dump_json(indent=2).encode() + b"\n")
    shutil.rmtree(parts)
    return facts


@contextmanager
def new_store_folder(out: Path) -> Iterator[Path]:
    """A folder to assemble the store `out` in: it becomes `out` when the block ends well, else it goes.

    Raises UserError if `out` holds anything.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: expected a new or empty folder, got one with something in it; choose another --out")
    staging = out.with_name(f".{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)  # of one that was killed
    (staging / PARTS).mkdir(parents=True)
    try:
        yield staging
        if out.exists():
            out.rmdir()
        staging.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_rejects(folder: Path, content: Content) -> None:
    """Writes `rejects.jsonl`: file, line, reason and excerpt of each quarantined document, in order."""
    with committed(folder / "rejects.jsonl", beside=folder / PARTS) as out:
        for chunk in content.rejects():
            out.write(chunk)


def _write_ids(folder: Path, content: Content) -> FileFacts:
    with committed(folder / "tokens.bin", beside=folder / PARTS) as out:
        for chunk in content.ids():
            out.write(chunk)
    return out.facts()


def _write_index(folder: Path, content: Content, vocabulary: Vocabulary) -> FileFacts:
    dtype, totals = vocabulary.dtype(), content.totals
    code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)
    with committed(folder / "tokens.idx", beside=folder / PARTS) as out:
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
    """Where things of these sizes begin, (n,) int64, the first at `first`; and where the last ends."""
    ends = first + np.cumsum(sizes, dtype="<i8")
    return np.concatenate([[first], ends])[:-1].astype("<i8"), int(ends[-1]) if len(ends) else first


def _write_bits(folder: Path, name: str, flags: Iterator[Bits]) -> FileFacts:
    left = np.zeros(0, dtype=np.uint8)  # the bits of a byte begun by one chunk and ended by the next
    with committed(folder / name, beside=folder / PARTS) as out:
        for packed, count in flags:
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little")
            bits = np.concatenate([left, bits])
            whole = len(bits) // 8 * 8
            out.write(np.packbits(bits[:whole], bitorder="little"))
            left = bits[whole:]
        out.write(np.packbits(left, bitorder="little"))
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
            with committed(copy) as out, file.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    out.write(chunk)
    if chat_template is not None:  # goes before one that stands in tokenizer_config.json
        with committed(draft / CHAT_TEMPLATE) as out:
            out.write(chat_template.encode())
    draft.rename(target)
    sync_folder(folder)

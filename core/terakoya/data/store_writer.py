"""Joins parts into a token store, in memory that does not grow with the store."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from terakoya.components import Encoded
from terakoya.data.parts import PartBuilder, PartFacts, committed, read_part, read_section, sync_folder
from terakoya.data.store import (
    DTYPE_CODES,
    IDX_HEADER,
    IDX_MAGIC,
    PARTS,
    FileFacts,
    StoreFacts,
    TokenStore,
    Unit,
)
from terakoya.data.vocab import Vocabulary
from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

LOCK = ".lock"
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
_PART_TOKENS = 1 << 22


@dataclass
class Totals:
    """The sums over all parts seen so far."""

    parts: int = 0
    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    literals: Counter[str] = field(default_factory=Counter)
    word_starts: bool = True

    def add(self, facts: PartFacts) -> None:
        """Counts one more part."""
        self.parts += 1
        self.tokens += facts.tokens
        self.sequences += facts.sequences
        self.documents += facts.documents
        self.rejected.update(facts.rejected)
        self.literals.update(facts.literals)
        if facts.tokens:
            self.word_starts &= facts.word_starts


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process. Raises UserError that names the host and process which holds it already."""
    file = folder / LOCK
    while True:
        stream = file.open("a+")
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            stream.close()
            raise UserError(
                f"{folder}: expected a folder that nobody writes to, but {holder} is preparing it; "
                "wait for it, or choose another --out"
            ) from None
        # The holder before us may have removed the file between our opening and our locking it.
        if file.exists() and os.fstat(stream.fileno()).st_ino == file.stat().st_ino:
            break
        stream.close()
    try:
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on host {socket.gethostname()}")
        stream.flush()
        yield
    finally:
        file.unlink(missing_ok=True)
        stream.close()


def join_parts(
    folder: Path,
    totals: Totals,
    *,
    vocabulary: Vocabulary,
    unit: Unit,
    eos: int | None,
    tokenizer_folder: Path | None,
    inputs: Mapping[str, str],
    options: Mapping[str, str | int | bool | None],
) -> StoreFacts:
    """Makes the store in `folder` from its parts 0 to `totals.parts` - 1: `store.json` last, then the parts go."""
    parts = folder / PARTS
    files = {"tokens.bin": _join_ids(folder, totals), "tokens.idx": _join_index(folder, totals, vocabulary)}
    if totals.word_starts:
        files["tokens.words"] = _join_words(folder, totals)
    if totals.rejected:
        write_rejects(folder, totals)
    if tokenizer_folder is not None:
        _copy_tokenizer(tokenizer_folder, folder)
    content = [unit, eos, vocabulary.model_dump(), {name: facts.sha256 for name, facts in files.items()}]
    facts = StoreFacts(
        unit=unit,
        eos=eos,
        documents=totals.documents,
        sequences=totals.sequences,
        tokens=totals.tokens,
        rejected=totals.rejected.total(),
        rejected_by_reason=dict(sorted(totals.rejected.items())),
        literals=dict(sorted(totals.literals.items())),
        dtype=vocabulary.dtype().name,
        vocabulary=vocabulary,
        word_starts=totals.word_starts,
        fingerprint=hashlib.sha256(orjson.dumps(content)).hexdigest(),
        inputs=dict(inputs),
        options=dict(options),
        files=files,
    )
    with committed(folder / "store.json", beside=parts) as out:
        out.write(facts.model_dump_json(indent=2).encode() + b"\n")
    shutil.rmtree(parts)
    return facts


def write_rejects(folder: Path, totals: Totals) -> None:
    """Writes `rejects.jsonl`: file, line, reason and excerpt of each quarantined document, in order."""
    with committed(folder / "rejects.jsonl", beside=folder / PARTS) as out:
        for chunk in _sections(folder, totals, "rejects"):
            out.write(chunk)


def _parts(folder: Path, totals: Totals) -> Iterator[tuple[int, PartFacts]]:
    for number in range(totals.parts):
        facts = read_part(folder / PARTS, number)
        if facts is None:
            raise UserError(
                f"{folder / PARTS}: part {number} is gone or was changed while it was needed; run the command again"
            )
        yield number, facts


def _sections(folder: Path, totals: Totals, name: str) -> Iterator[bytes]:
    for number, facts in _parts(folder, totals):
        yield from read_section(folder / PARTS, number, facts, name)


def _join_ids(folder: Path, totals: Totals) -> FileFacts:
    with committed(folder / "tokens.bin", beside=folder / PARTS) as out:
        for chunk in _sections(folder, totals, "ids"):
            out.write(chunk)
    return out.facts()


def _join_index(folder: Path, totals: Totals, vocabulary: Vocabulary) -> FileFacts:
    dtype = vocabulary.dtype()
    code = next(code for code, name in DTYPE_CODES.items() if np.dtype(name) == dtype)
    with committed(folder / "tokens.idx", beside=folder / PARTS) as out:
        out.write(IDX_HEADER.pack(IDX_MAGIC, 1, code, totals.sequences, totals.documents + 1))
        for chunk in _sections(folder, totals, "lengths"):
            out.write(chunk)
        position = 0
        for chunk in _sections(folder, totals, "lengths"):
            ends = position + np.cumsum(np.frombuffer(chunk, "<i4"), dtype=np.int64) * dtype.itemsize
            out.write(np.concatenate([[position], ends[:-1]]).astype("<i8"))
            position = int(ends[-1])
        first = 0
        for chunk in _sections(folder, totals, "documents"):
            ends = first + np.cumsum(np.frombuffer(chunk, "<i4"), dtype=np.int64)
            out.write(np.concatenate([[first], ends[:-1]]).astype("<i8"))
            first = int(ends[-1])
        out.write(np.array([first], dtype="<i8"))
    assert position == totals.tokens * dtype.itemsize and first == totals.sequences, "parts do not add up"
    return out.facts()


def _join_words(folder: Path, totals: Totals) -> FileFacts:
    left = np.zeros(0, dtype=np.uint8)  # the bits of a byte begun by one part and ended by the next
    with committed(folder / "tokens.words", beside=folder / PARTS) as out:
        for number, facts in _parts(folder, totals):
            remaining = facts.tokens
            for chunk in read_section(folder / PARTS, number, facts, "words"):
                count = min(remaining, 8 * len(chunk))
                remaining -= count
                bits = np.unpackbits(np.frombuffer(chunk, np.uint8), count=count, bitorder="little")
                bits = np.concatenate([left, bits])
                whole = len(bits) // 8 * 8
                out.write(np.packbits(bits[:whole], bitorder="little"))
                left = bits[whole:]
        out.write(np.packbits(left, bitorder="little"))
    return out.facts()


def _copy_tokenizer(source: Path, folder: Path) -> None:
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
    draft.rename(target)
    sync_folder(folder)


def write_store(
    folder: Path,
    documents: Iterable[Sequence[Sequence[int] | np.ndarray]],
    *,
    vocabulary: Vocabulary,
    unit: Unit = "document",
    eos: int | None = None,
    word_starts: Iterable[Sequence[Sequence[bool] | np.ndarray]] | None = None,
    tokenizer_folder: Path | None = None,
) -> TokenStore:
    """Makes a store in the new folder `folder` from ids that are there already.

    Each document is the ids of its lines; `word_starts`, if given, has the same shape. Raises UserError if `folder`
    holds anything, or for ids outside `vocabulary`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: expected a new folder, got one with files in it")
    (folder / PARTS).mkdir(parents=True)
    totals = Totals()
    flags = iter(word_starts) if word_starts is not None else None
    builder = PartBuilder(vocabulary, unit, eos)
    for document in documents:
        lines = [np.asarray(line) for line in document if len(line)]
        words = None if flags is None else [np.asarray(line, dtype=bool) for line in next(flags) if len(line)]
        encoded = Encoded(
            ids=np.concatenate([np.zeros(0, dtype=np.int64), *lines]),
            line_lengths=np.array([len(line) for line in lines], dtype=np.int32),
            document_lines=np.array([len(lines)], dtype=np.int32),
            word_starts=None if words is None else np.concatenate([np.zeros(0, dtype=bool), *words]),
        )
        builder.add(encoded)
        if builder.tokens >= _PART_TOKENS:
            totals.add(builder.write(folder / PARTS, totals.parts, ""))
            builder = PartBuilder(vocabulary, unit, eos)
    totals.add(builder.write(folder / PARTS, totals.parts, ""))
    if not totals.tokens:
        raise UserError(f"{folder}: expected at least one token, got none")
    join_parts(
        folder,
        totals,
        vocabulary=vocabulary,
        unit=unit,
        eos=eos,
        tokenizer_folder=tokenizer_folder,
        inputs={},
        options={},
    )
    return TokenStore.open(folder)

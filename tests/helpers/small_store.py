"""A token store made of Python lists, for tests of what is built on stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from terakoya.atomic_files import FileFacts, dump_hashed_json
from terakoya.components.vocabulary import Vocabulary
from terakoya.store.block_checksums import BlockChecksums
from terakoya.store.token_store import CHECKSUMS, DATA_FILES

PAD, UNK, CLS, SEP, MASK = range(5)
FIRST = 10
"""The first ordinary id."""


def vocabulary(size: int = 60_000) -> Vocabulary:
    return Vocabulary(size=size, pad=PAD, unk=UNK, cls=CLS, sep=SEP, mask=MASK, special=tuple(range(FIRST)))


@dataclass
class SmallStore:
    """What training reads of a `TokenStore`."""

    folder: Path
    facts: SimpleNamespace
    tokens: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    fingerprint: str

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def local_folder(self) -> Path:
        return self.folder

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def touch(self, start: np.ndarray, length: np.ndarray | int) -> None:
        assert (start >= 0).all() and (start + length <= len(self.tokens)).all()

    def sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        return self.offsets[sequences]

    def first_sequences(self, documents: np.ndarray) -> np.ndarray:
        return self.documents[documents]

    def document_starts(self, documents: np.ndarray, *, check: bool = True) -> np.ndarray:
        return self.offsets[self.documents[documents]]

    def flag_bits(self, name: str) -> tuple[np.ndarray, int]:
        return np.fromfile(self.folder / f"tokens.{name}", np.uint8), 0


def small_store(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    unit: str = "line",
    eos: int | None = None,
    words: bool = True,
    size: int = 60_000,
) -> SmallStore:
    """A store of documents given as the lengths of their lines. Its ordinary tokens are FIRST, FIRST + 1, ... in
    order, so that each is found once; a word starts at every token whose id is even. `eos` follows each document."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens: list[int] = []
    lengths: list[int] = []
    first: list[int] = [0]
    next_id = FIRST
    for lines in documents:
        for number, length in enumerate(lines):
            ids = list(range(next_id, next_id + length))
            next_id += length
            if eos is not None and number == len(lines) - 1:
                ids.append(eos)
            tokens += ids
            lengths.append(len(ids))
        if unit == "document" and lines:
            merged = sum(lengths[first[-1] :])
            del lengths[first[-1] :]
            lengths.append(merged)
        first.append(len(lengths))
    assert next_id <= size
    array = np.array(tokens, np.uint16)
    if words:
        np.packbits(array % 2 == 0, bitorder="little").tofile(folder / "tokens.words")
    facts = SimpleNamespace(
        unit=unit,
        eos=eos,
        documents=len(documents),
        sequences=len(lengths),
        tokens=len(tokens),
        vocabulary=vocabulary(size),
        word_starts=words,
        learned=False,
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    fingerprint = f"{unit}-{eos}-{hash((tuple(map(tuple, documents)),)):x}"
    return SmallStore(folder, facts, array, offsets, np.array(first, np.int64), fingerprint)


def rewrite_store_json(folder: Path, **changes: Any) -> None:
    """Makes the record of a real store true again, with `changes`, after a test has changed its files."""
    record = json.loads((folder / "store.json").read_text())
    del record["sha256"]
    files = {name: facts for name, facts in record["files"].items() if not name.startswith("tokenizer/")}
    data = [folder / name for name in DATA_FILES if (folder / name).exists()]
    blocks = []
    for file in data:
        blocks.append(BlockChecksums())
        blocks[-1].add(file.read_bytes())
    np.concatenate([each.values() for each in blocks]).tofile(folder / CHECKSUMS)
    tokenizer = [file for file in (folder / "tokenizer").rglob("*") if file.is_file()]
    for file in (*data, folder / CHECKSUMS, *sorted(tokenizer)):
        files[file.relative_to(folder).as_posix()] = FileFacts.of(file).model_dump()
    (folder / "store.json").write_bytes(dump_hashed_json({**record, "files": files, **changes}))


def damage(file: Path) -> None:
    """Changes one bit in the middle; of an id the lowest, so that it stays one of the vocabulary."""
    content = bytearray(file.read_bytes())
    content[len(content) // 4 * 2] ^= 1
    file.write_bytes(content)

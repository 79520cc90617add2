"""The token store: a folder of token ids that training reads without opening raw text or a tokenizer.

`tokens.bin` and `tokens.idx` are Megatron-LM's indexed dataset (MMIDIDX, little-endian); `tokens.words` holds one bit
per token, least significant first, set where a word starts; `tokens.answers` likewise marks tokens of answers, which a
model learns to write; `documents.sizes` holds how much text each document is; `store.json`, written last, records what
the store holds, with hashes of all files and of itself.

Letters: T tokens, N sequences (a document or a line, by `unit`), D documents, n any number of these.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import orjson
import pydantic
from pydantic import BaseModel, ConfigDict

from terakoya.atomic_files import FileFacts, load_hashed_json
from terakoya.components.vocabulary import Vocabulary
from terakoya.errors import UserError
from terakoya.folder_kinds import describe_found
from terakoya.places import as_written, place_of
from terakoya.store.block_checksums import CHECKSUMS, CheckedFile, open_checked_files
from terakoya.store.document_sizes import FILE as SIZES_FILE
from terakoya.store.document_sizes import SIZES, TextPerToken
from terakoya.store.file_hashes import TOKENIZER, check_hashes, check_tokenizer
from terakoya.store.quick_checks import check_index_ends, check_some_ids

IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version 1, dtype code, N, document entries (D + 1). Then int32[N], int64[N], int64[D + 1]."""
DTYPE_CODES: Mapping[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
PARTS = ".parts"
"""The sub-folder of an unfinished store that holds its finished parts."""
DATA_FILES = ("tokens.bin", "tokens.idx", "tokens.words", "tokens.answers")
VERSION: Literal[2] = 2
"""Version of the format of `store.json`."""
_CHUNK = 1 << 20

Unit = Literal["document", "line"]


WORDS, LEARNED, SIZES_KNOWN = "words", "answers", "sizes"
"""What a store may know of its tokens (in the files `tokens.NAME`) and of its documents."""


@dataclass(frozen=True)
class Counts:
    """Sums over documents.

    Attributes:
        rejected, literals, notes: counts of rejected documents by reason, of special tokens in the text, and others.
        known: what is known of all tokens: `WORDS`, `LEARNED`, `SIZES_KNOWN`; of no token, anything.
    """

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    rejected: Mapping[str, int] = field(default_factory=Counter)
    literals: Mapping[str, int] = field(default_factory=Counter)
    notes: Mapping[str, int] = field(default_factory=Counter)
    known: frozenset[str] = frozenset({WORDS, LEARNED, SIZES_KNOWN})

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.documents + other.documents,
            _sum(self.rejected, other.rejected),
            _sum(self.literals, other.literals),
            _sum(self.notes, other.notes),
            self.known & other.known if other.tokens else self.known,
        )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> Counter[str]:
    """Returns the sums, those of 0 too, which + leaves out."""
    total = Counter(one)
    total.update(other)
    return total


class StoreFacts(BaseModel):
    """What a store holds and what it was made from: the content of `store.json`.

    Attributes:
        unit: what one sequence is: a document, or a line of it.
        eos: the id that is stored after each document, None if there is none.
        rejected: number of rejected documents; `rejected_by_reason` counts them by reason, `rejects.jsonl` lists them.
        literals: special tokens that the text contained literally, with their counts.
        notes: other counts that were taken while the store was made, by name.
        word_starts: whether the store has `tokens.words`.
        answers: whether the store holds conversations and has `tokens.answers`.
        fingerprint: hash of the content; stores with the same fingerprint have the same bytes.
        inputs: hashes of what the store was made from: corpus, tokenizer, options.
        files: size and SHA-256 of each file, those of the tokenizer included, by its path in the store.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[2] = VERSION
    unit: Unit
    eos: int | None
    documents: int
    sequences: int
    tokens: int
    rejected: int = 0
    rejected_by_reason: dict[str, int] = {}
    literals: dict[str, int] = {}
    notes: dict[str, int] = {}
    dtype: Literal["uint16", "int32"]
    vocabulary: Vocabulary
    word_starts: bool
    answers: bool = False
    fingerprint: str
    inputs: dict[str, str] = {}
    options: dict[str, str | int | bool | None] = {}
    files: dict[str, FileFacts]

    @classmethod
    def of(cls, counts: Counts, **others: Any) -> Self:
        """Returns the facts of a store with these `counts` and its `others`."""
        return cls(
            documents=counts.documents,
            sequences=counts.sequences,
            tokens=counts.tokens,
            rejected=sum(counts.rejected.values()),
            rejected_by_reason=dict(sorted(counts.rejected.items())),
            literals=dict(sorted(counts.literals.items())),
            notes=dict(sorted(counts.notes.items())),
            word_starts=WORDS in counts.known,
            answers=LEARNED in counts.known,
            **others,
        )

    @property
    def learned(self) -> bool:
        """Whether it is marked which tokens a model learns to write: those of answers."""
        return self.answers

    @property
    def sizes(self) -> bool:
        """Whether the store knows how much text its documents are."""
        return SIZES_FILE in self.files

    @property
    def counts(self) -> Counts:
        """The sums over all documents, and what is known of them."""
        known = {WORDS: self.word_starts, LEARNED: self.answers, SIZES_KNOWN: self.sizes}
        sums = (self.tokens, self.sequences, self.documents, self.rejected_by_reason, self.literals, self.notes)
        return Counts(*sums, frozenset(name for name, is_known in known.items() if is_known))

    @property
    def data_files(self) -> dict[str, FileFacts]:
        """The files of tokens, of their index and of their flags, in the order of `DATA_FILES`."""
        return {name: self.files[name] for name in DATA_FILES if name in self.files}


def content_fingerprint(unit: Unit, eos: int | None, vocabulary: Vocabulary, files: Mapping[str, FileFacts]) -> str:
    """Returns the fingerprint of a store with the data `files`."""
    hashes = {name: facts.sha256 for name, facts in files.items()}
    return hashlib.sha256(orjson.dumps([unit, eos, vocabulary.model_dump(), hashes])).hexdigest()


@dataclass(frozen=True)
class Index:
    """The header of `tokens.idx` and its three arrays, mapped from the file.

    Attributes:
        dtype: of `tokens.bin`.
        lengths: (N,) int32 tokens of each sequence.
        pointers: (N,) int64 byte position of each sequence in `tokens.bin`.
        documents: (D + 1,) int64 first sequence of each document, ending with N.
    """

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    @classmethod
    def open(cls, file: Path, *, remedy: str = "prepare the store again") -> Self:
        """Maps the index `file`. Raises UserError, ending with `remedy`, for a missing file, another format, or a size
        that does not agree with the header."""
        try:
            with file.open("rb") as stream:
                header = stream.read(IDX_HEADER.size)
        except FileNotFoundError:
            raise UserError(f"{file}: no such file; expected the index of a token store") from None
        if len(header) < IDX_HEADER.size or not header.startswith(IDX_MAGIC):
            raise UserError(f"{file}: expected a Megatron index (magic MMIDIDX), got {header[:9]!r}")
        _, version, code, sequences, entries = IDX_HEADER.unpack(header)
        if version != 1 or code not in DTYPE_CODES or entries < 1:
            raise UserError(
                f"{file}: expected version 1, a dtype code of 1 to 8 and a document entry, "
                f"got version {version}, code {code}, {entries} entries"
            )
        expected = IDX_HEADER.size + 12 * sequences + 8 * entries
        if (size := file.stat().st_size) != expected:
            raise UserError(
                f"{file}: expected {expected:,} bytes for {sequences:,} sequences and {entries:,} document entries, "
                f"got {size:,}: truncated or damaged; {remedy}"
            )
        at = IDX_HEADER.size
        content = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))  # as a memmap every access is slower
        return cls(
            dtype=np.dtype(DTYPE_CODES[code]),
            lengths=content[at : at + 4 * sequences].view("<i4"),
            pointers=content[at + 4 * sequences : at + 12 * sequences].view("<i8"),
            documents=content[at + 12 * sequences :].view("<i8"),
        )


def _pointers_at(index: Index) -> int:
    """The byte of tokens.idx at which the pointers begin."""
    return IDX_HEADER.size + 4 * len(index.lengths)


@dataclass(frozen=True)
class TokenStore:
    """A finished store, opened by its headers; arrays are mapped, not read. Picklable."""

    folder: Path
    facts: StoreFacts
    index: Index

    @classmethod
    def open(cls, folder: Path, *, headers_only: bool = False) -> TokenStore:
        """Opens the store in `folder`. Raises UserError if the store is missing, unfinished, truncated or inconsistent
        and, unless `headers_only`, if its tokenizer was changed or one of the ids sampled from the whole file is not in
        the vocabulary."""
        folder = Path(folder)
        facts = read_facts(folder)
        index = Index.open(folder / "tokens.idx")
        expected = {
            "sequences": (facts.sequences, len(index.lengths)),
            "documents": (facts.documents, len(index.documents) - 1),
            "dtype": (np.dtype(facts.dtype), index.dtype),
        }
        for name, (wanted, got) in expected.items():
            if wanted != got:
                raise UserError(
                    f"{folder / 'tokens.idx'}: {name}: expected {wanted} as store.json says, got {got}; "
                    "the files belong to different stores: prepare the store again"
                )
        data_bytes = facts.tokens * index.dtype.itemsize
        _check_size(folder / "tokens.bin", data_bytes)
        _check_size(folder / CHECKSUMS, facts.files[CHECKSUMS].size)
        for name in facts.counts.known & {WORDS, LEARNED}:
            _check_size(folder / f"tokens.{name}", (facts.tokens + 7) // 8)
        if facts.sizes:
            _check_size(folder / SIZES_FILE, 2 * SIZES.itemsize * facts.documents)
        check_index_ends(
            folder / "tokens.idx",
            index.lengths,
            index.pointers,
            index.documents,
            data_bytes=data_bytes,
            itemsize=index.dtype.itemsize,
        )
        store = cls(folder, facts, index)
        if not headers_only:
            check_tokenizer(folder, facts.files)
            remedy = "damaged, or the store.json of another store; prepare the store again"
            check_some_ids(folder / "tokens.bin", store.tokens, facts.vocabulary.size, remedy=remedy)
        return store

    def __reduce__(self) -> tuple[object, ...]:
        return TokenStore.open, (self.folder,)

    @property
    def local_folder(self) -> Path:
        """The folder of this machine that holds the files: `folder`, or what was copied here of another place."""
        return self.folder

    @property
    def data_folder(self) -> Path:
        """The folder of this machine that holds the tokens and their flags."""
        return self.local_folder

    @property
    def name(self) -> str:
        """The folder or the place, as a user writes it."""
        return as_written(self.folder)

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        return self.facts.fingerprint

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with the store's copy of the tokenizer that made the ids."""
        return self.local_folder / TOKENIZER

    @cached_property
    def tokens(self) -> np.ndarray:
        """All ids (T,), in the stored type."""
        return np.memmap(self.data_folder / "tokens.bin", dtype=self.index.dtype, mode="r")

    @cached_property
    def _checked_files(self) -> Mapping[str, CheckedFile]:
        check_hashes(self.local_folder, self.facts.files, CHECKSUMS)
        files = open_checked_files(
            self.local_folder, np.fromfile(self.local_folder / CHECKSUMS, "<u4"), self.facts.data_files
        )
        self._skip_lengths(files)
        return files

    def _skip_lengths(self, files: Mapping[str, CheckedFile]) -> None:
        files["tokens.idx"].skip(_pointers_at(self.index))  # the lengths are in the pointers, too, and never read

    def reading(self) -> AbstractContextManager[None]:
        """What is touched while the returned context is open can be read for so long."""
        return nullcontext()

    def touch(self, start: np.ndarray, length: np.ndarray | int) -> None:
        """Compares what the files hold of `length` tokens from `start` on, (n,) each, with checksums, where this
        process has not done so before. Raises UserError for damage."""
        if not any(file.remaining for name, file in self._checked_files.items() if name != "tokens.idx"):
            return
        start, stop = start[real := np.broadcast_to(length, start.shape) > 0], (start + length)[real]
        size = self.index.dtype.itemsize
        for name, file in self._checked_files.items():
            if name != "tokens.idx":
                file.touch(*bytes_of_tokens(name, start, stop, size))

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Returns a copy of the ids of the tokens [start, stop), in the stored type. Raises UserError for damage."""
        with self.reading():
            self.touch(np.array([start]), stop - start)
            return np.array(self.tokens[start:stop])

    def sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        """Returns where each of `sequences` (n,) starts in the tokens; for N, where the last one ends. Raises UserError
        for damage."""
        pointers = self.index.pointers
        inside = np.minimum(sequences, len(pointers) - 1)
        self._touch_index(_pointers_at(self.index), inside)
        starts: np.ndarray = pointers[inside] >> self._size_bits  # not np.take: it would copy an unaligned array
        starts[sequences == len(pointers)] = self.facts.tokens
        return starts

    def first_sequences(self, documents: np.ndarray) -> np.ndarray:
        """Returns the first sequence of each of `documents` (n,); for D, N. Raises UserError for damage."""
        self._touch_index(IDX_HEADER.size + 12 * len(self.index.lengths), documents)
        return self.index.documents[documents]

    def document_starts(self, documents: np.ndarray, *, check: bool = True) -> np.ndarray:
        """Returns where each of `documents` (n,) starts in the tokens; for D, where the last one ends. Raises UserError
        for damage. Without `check` damage is not noticed and D is not allowed: for searches, and for documents whose
        starts were read before."""
        if check:
            return self.sequence_starts(self.first_sequences(documents))
        starts: np.ndarray = self.index.pointers[self.index.documents[documents]] >> self._size_bits
        return starts

    @cached_property
    def _size_bits(self) -> int:
        """A token has 1 << _size_bits bytes."""
        return self.index.dtype.itemsize.bit_length() - 1

    def _touch_index(self, first_byte: int, entries: np.ndarray) -> None:
        """`entries` (n,) are the numbers of entries of 8 bytes from `first_byte` of tokens.idx on."""
        file = self._checked_files["tokens.idx"]
        if file.remaining:
            start = first_byte + 8 * entries
            file.touch(start, start + 8)

    @property
    def offsets(self) -> np.ndarray:
        """(N + 1,) int64: sequence i is `tokens[offsets[i]:offsets[i + 1]]`. Takes 8 bytes of memory per sequence."""
        return self.sequence_starts(np.arange(len(self.index.pointers) + 1))

    @property
    def documents(self) -> np.ndarray:
        """(D + 1,) int64: document d is the sequences `documents[d]` to `documents[d + 1]`."""
        return self.index.documents

    @cached_property
    def sizes(self) -> np.ndarray:
        """Characters and bytes of each document's text, (D, 2). Raises UserError for damage, and for a store that does
        not know them."""
        if not self.facts.sizes:
            raise UserError(f"{self.folder}: expected sizes of documents, got a store without {SIZES_FILE}")
        check_hashes(self.local_folder, self.facts.files, SIZES_FILE)
        return np.memmap(self.local_folder / SIZES_FILE, SIZES, mode="r").reshape(-1, 2)

    @cached_property
    def text_per_token(self) -> TextPerToken | None:
        """The mean over all tokens; None for a store that does not know its text. Raises UserError for damage."""
        if not self.facts.sizes:
            return None
        characters, size = self.sizes.sum(axis=0, dtype=np.int64).tolist()
        return TextPerToken(characters / self.facts.tokens, size / self.facts.tokens)

    def flag_bits(self, name: str) -> tuple[np.ndarray, int]:
        """Returns the flags in the file `tokens.NAME`, eight in a byte, least significant first, and the position of
        the first flag in the first byte."""
        return np.memmap(self.data_folder / f"tokens.{name}", dtype=np.uint8, mode="r"), 0

    def word_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns (stop - start,) bool: which tokens start a word. Raises UserError for a store without word starts."""
        if not self.facts.word_starts:
            raise UserError(
                f"{self.folder}: expected word starts, got a store without tokens.words: its tokenizer does not know "
                "words; set whole_word_mask to false, or prepare with --words or with a tokenizer that does"
            )
        return self.read_flags(WORDS, start, stop)

    def read_learned(self, start: int, stop: int) -> np.ndarray:
        """Returns (stop - start,) bool: which tokens belong to answers. Raises UserError for a store of plain text."""
        if not self.facts.learned:
            raise UserError(
                f"{self.folder}: expected a store of conversations, got one without tokens.answers; prepare it from "
                "conversations: terakoya prepare FILES --conversations --tokenizer DIR --out STORE"
            )
        return self.read_flags(LEARNED, start, stop)

    def read_flags(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns (stop - start,) bool, the flags of tokens in the file `tokens.NAME`, which must be there."""
        with self.reading():
            self.touch(np.array([start]), stop - start)
            return _unpack(self.flag_bits(name), start, stop)

    @property
    def learned_tokens(self) -> int:
        """Number of tokens that a model learns to write."""
        return sum(
            int(np.count_nonzero(self.read_learned(start, min(start + _CHUNK, self.facts.tokens))))
            for start in range(0, self.facts.tokens, _CHUNK)
        )


def bytes_of_tokens(name: str, start: np.ndarray, stop: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes [first, last + 1) that the data file `name` holds of the tokens [start, stop), (n,) each, of
    `size` bytes each."""
    return (start * size, stop * size) if name == "tokens.bin" else (start >> 3, (stop + 7) >> 3)


def _unpack(bits: tuple[np.ndarray, int], start: int, stop: int) -> np.ndarray:
    """Returns the flags [start, stop) of `bits`, which have the form of `TokenStore.flag_bits`."""
    packed, skipped = bits
    start, stop = start + skipped, stop + skipped
    flags = np.unpackbits(packed[start // 8 : (stop + 7) // 8], bitorder="little")
    return flags[start % 8 : start % 8 + stop - start].view(bool)


def count_store(folder: Path) -> Counts:
    """Returns the counts of the store `folder`, from headers and file sizes alone; reads no ids. Raises UserError as
    `TokenStore.open`."""
    return TokenStore.open(folder, headers_only=True).facts.counts


def read_facts(folder: Path) -> StoreFacts:
    """Reads `folder`/store.json. Raises UserError if there is no finished store, or if the file was changed."""
    file = Path(folder) / "store.json"
    remedy = "prepare the store again"
    try:
        record = load_hashed_json(file.read_bytes())
        if record.get("version") != VERSION:
            raise ValueError(f"version: expected {VERSION}, got {record.get('version')}: of another terakoya")
        return StoreFacts.model_validate(record)
    except (FileNotFoundError, NotADirectoryError):
        if (file.parent / PARTS).exists():
            hint = "prepare has not finished here: run the same command again, which finishes it or says why it cannot"
        elif (file.parent / "tokens.idx").exists():
            hint = "there are Megatron files, but no record of what they hold; see `terakoya store import`"
        else:
            raise UserError(
                f"{folder}: expected a finished token store, got {describe_found(Path(folder), 'token store')}"
                + ("" if Path(folder).exists() else "; make one with `terakoya prepare`")
            ) from None
        raise UserError(f"{file}: expected a finished token store, got no such file; {hint}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where}: {first['msg']}; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{file}: {error}; {remedy}") from None


def _check_size(file: Path, expected: int) -> None:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; the store is incomplete: prepare the store again") from None
    if size != expected:
        raise UserError(
            f"{file}: expected {expected:,} bytes, got {size:,}: truncated or damaged; prepare the store again"
        )


def open_store(folder: Path) -> TokenStore:
    """Opens the token store `folder`, which may be in another place. Raises UserError as `TokenStore.open` and
    `Place.open_store`."""
    place = place_of(folder)
    store: TokenStore = TokenStore.open(folder) if place.is_local else place.open_store()
    return store

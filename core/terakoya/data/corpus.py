"""Raw text as documents: jsonl and txt files, plain or gzipped, cut into blocks that any process can read.

A block never splits a document and depends on the files alone, so results do not depend on how many processes share
the blocks. Whatever is not a document comes out as a `Reject` with its file and line, never as an exception.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import orjson

from terakoya.errors import UserError

Reason = Literal[
    "bad UTF-8",
    "bad JSON",
    "not a JSON object",
    "missing field",
    "field is not a string",
    "empty document",
    "document too large",
    "no tokens",
    "special token in text",
]
"""Why a document was quarantined. The last two are found while encoding."""

SUFFIXES = (".jsonl", ".txt", ".jsonl.gz", ".txt.gz")
EXCERPT_CHARACTERS = 80
_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
# A blank line: spaces, tabs, carriage returns and ideographic spaces (U+3000, three bytes in UTF-8) only.
_BLANK = re.compile(rb"(?:[ \t\r\n]|\xe3\x80\x80)*\Z")


@dataclass(frozen=True)
class Document:
    """One document: its text, without the line ending, and the line (from 1) of `file` that it begins in."""

    text: str
    file: Path
    line: int


@dataclass(frozen=True)
class Reject:
    """What could not be taken as a document, and where it stands."""

    file: Path
    line: int
    reason: Reason
    excerpt: str


@dataclass(frozen=True)
class Block:
    """Whole documents of one file, picklable.

    Attributes:
        start, stop: byte range in the file, after decompression.
        line: the number of the first line, from 1.
        disk_bytes: how many bytes of the file on disk this block stands for, for progress.
        data: the bytes themselves for compressed files (a document over the limit is cut short, which keeps it over
            the limit); None for plain files, which are read where the block is.
    """

    file: Path
    start: int
    stop: int
    line: int
    disk_bytes: int
    data: bytes | None = None


@dataclass(frozen=True)
class Corpus:
    """Files of documents, in the given order; a folder stands for its corpus files, sorted by path.

    `jsonl`: one object a line, the text under `field`. `txt`: with `documents="blank"` documents are separated by blank
    lines, with `"line"` every line is one. Lines with nothing but white space hold no document. A byte order mark at
    a file's start and carriage returns before line ends are dropped; NUL and other control characters are kept.
    A document of more than `max_document_bytes` is rejected without being read into memory.

    Raises UserError for a missing file or an unknown file name ending.
    """

    sources: Sequence[Path]
    _: KW_ONLY
    field: str = "text"
    documents: Literal["blank", "line"] = "blank"
    max_document_bytes: int = 100_000_000
    block_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if self.documents not in ("blank", "line"):
            raise UserError(f'documents: expected "blank" or "line", got "{self.documents}"')
        if self.max_document_bytes < 1 or self.block_bytes < 1:
            raise UserError("max_document_bytes and block_bytes: expected at least 1")
        files: list[Path] = []
        for source in map(Path, self.sources):
            if source.is_dir():
                inside = sorted(f for f in source.rglob("*") if f.is_file() and _kind(f) is not None)
                if not inside:
                    raise UserError(f"{source}: expected files ending in {', '.join(SUFFIXES)}, found none")
                files += inside
            elif not source.is_file():
                raise UserError(f"{source}: no such file")
            elif _kind(source) is None:
                raise UserError(f"{source}: expected a file name ending in {', '.join(SUFFIXES)}")
            else:
                files.append(source)
        if not files:
            raise UserError("corpus: expected at least one file, got none")
        object.__setattr__(self, "sources", tuple(files))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all files as they lie on disk."""
        return sum(file.stat().st_size for file in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and contents (read whole, once); where they lie does not matter."""
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            hashes = list(pool.map(_file_sha256, self.sources))
        facts = [[file.name, file.stat().st_size, digest] for file, digest in zip(self.sources, hashes, strict=True)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def blocks(self, *, block_bytes: int | None = None) -> Iterator[Block]:
        """Cuts the files into blocks of about `block_bytes` (after decompression) at document boundaries.

        Reads every file once, in one pass and in bounded memory. Raises UserError for a damaged compressed file.
        """
        for file in self.sources:
            yield from self._file_blocks(file, block_bytes or self.block_bytes)

    def read(self, block: Block) -> Iterator[Document | Reject]:
        """The documents and rejects of `block`, in order."""
        is_jsonl = _kind(block.file) == "jsonl"
        with io.BytesIO(block.data) if block.data is not None else block.file.open("rb") as stream:
            if block.data is None:
                stream.seek(block.start)
            limit = self.max_document_bytes
            lines = _lines(stream, block, limit)
            if self._by_paragraph(block.file):
                records = _paragraphs(lines, limit)
            else:
                records = ((line, record, len(record) > limit) for line, record, _ in lines)
            for line, record, too_large in records:
                if too_large:
                    yield Reject(block.file, line, "document too large", _excerpt(record))
                elif not _BLANK.match(record):
                    yield self._document(block.file, line, record, is_jsonl)

    def _by_paragraph(self, file: Path) -> bool:
        return self.documents == "blank" and _kind(file) == "txt"

    def _document(self, file: Path, line: int, record: bytes, is_jsonl: bool) -> Document | Reject:
        reason: Reason
        try:
            if not is_jsonl:
                return Document(record.decode(), file, line)
            value = orjson.loads(record)
        except UnicodeDecodeError:
            return Reject(file, line, "bad UTF-8", _excerpt(record))
        except orjson.JSONDecodeError:
            reason = "bad JSON" if _is_utf8(record) else "bad UTF-8"
            return Reject(file, line, reason, _excerpt(record))
        if not isinstance(value, dict):
            reason = "not a JSON object"
        elif self.field not in value:
            reason = "missing field"
        elif not isinstance(text := value[self.field], str):
            reason = "field is not a string"
        elif not text or text.isspace():
            reason = "empty document"
        else:
            return Document(text, file, line)
        return Reject(file, line, reason, _excerpt(record))

    def _file_blocks(self, file: Path, block_bytes: int) -> Iterator[Block]:
        keep = file.suffix.lower() == ".gz"
        start, line, disk = 0, 1, 0
        size = file.stat().st_size
        with file.open("rb") as raw:
            stream: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if keep else raw
            try:
                while True:
                    bytes_read, newlines, data = self._one_block(file, stream, block_bytes, keep)
                    if not bytes_read:
                        return
                    disk_stop = raw.tell() if bytes_read >= block_bytes else size
                    yield Block(file, start, start + bytes_read, line, disk_stop - disk, data)
                    start, line, disk = start + bytes_read, line + newlines, disk_stop
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise UserError(
                    f"{file}: expected a whole gzip file, got a damaged or truncated one after {start:,} bytes of "
                    f"text ({error}); get or make the file again"
                ) from error

    def _one_block(
        self, file: Path, stream: io.BufferedIOBase, block_bytes: int, keep: bool
    ) -> tuple[int, int, bytes | None]:
        """Moves `stream` over one block. Returns its bytes, its newlines, and its content if `keep`."""
        kept = bytearray()
        count = newlines = 0

        def take(piece: bytes, room: int) -> bytes:
            nonlocal count, newlines
            count += len(piece)
            newlines += piece.count(b"\n")
            if keep and len(kept) < room:
                kept.extend(piece)
            return piece

        while count < block_bytes:
            if not take(stream.read(min(_READ_BYTES, block_bytes - count)), block_bytes):
                return count, newlines, bytes(kept) if keep else None
        # The document that the cut falls into belongs to this block. Of one over the limit only so much is kept as
        # shows that it is over the limit.
        room = block_bytes + self.max_document_bytes + 8
        by_paragraph = self._by_paragraph(file)
        is_first = True
        while True:
            whole_line = True
            piece = take(stream.readline(_READ_BYTES), room)
            blank = bool(_BLANK.match(piece))
            while piece and not piece.endswith(b"\n"):
                piece, whole_line = take(stream.readline(_READ_BYTES), room), False
            if not piece or not by_paragraph or (blank and whole_line and not is_first):
                return count, newlines, bytes(kept) if keep else None
            is_first = False


def _kind(file: Path) -> Literal["jsonl", "txt"] | None:
    name = file.name.lower().removesuffix(".gz")
    return "jsonl" if name.endswith(".jsonl") else "txt" if name.endswith(".txt") else None


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_utf8(record: bytes) -> bool:
    try:
        record.decode()
    except UnicodeDecodeError:
        return False
    return True


def _excerpt(record: bytes) -> str:
    return record[: 4 * EXCERPT_CHARACTERS].decode(errors="backslashreplace")[:EXCERPT_CHARACTERS]


def _lines(stream: io.BufferedIOBase, block: Block, limit: int) -> Iterator[tuple[int, bytes, int]]:
    """Yields each line of `block` as (number, content, bytes with its ending).

    A line's content is cut short a little above `limit` bytes.
    """
    remaining = block.stop - block.start
    number = block.line
    while remaining > 0:
        line = tail = stream.readline(min(limit + len(_BOM) + 2, remaining))
        if not line:
            return
        size = len(line)
        while size < remaining and tail and not tail.endswith(b"\n"):
            tail = stream.readline(min(_READ_BYTES, remaining - size))
            size += len(tail)
        remaining -= size
        if number == 1:
            line = line.removeprefix(_BOM)
        yield number, line.removesuffix(b"\n").removesuffix(b"\r"), size
        number += 1


def _paragraphs(lines: Iterator[tuple[int, bytes, int]], limit: int) -> Iterator[tuple[int, bytes, bool]]:
    """Joins lines up to each blank one. Yields (first line, content, too large); too large ones are cut short."""
    first, size = 0, 0
    kept: list[bytes] = []
    for number, content, line_bytes in lines:
        if _BLANK.match(content):
            if size:
                yield first, b"\n".join(kept), size > limit
            kept, size = [], 0
            continue
        if not size:
            first = number
        if size <= limit:
            kept.append(content)
        size += line_bytes
    if size:
        yield first, b"\n".join(kept), size > limit

"""Text formats: jsonl, txt, csv and tsv, cut into blocks of whole documents and read back line by line."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import orjson

from terakoya.corpus.conversations import conversation_document
from terakoya.corpus.documents import Block, Document, Reason, Reject, reject_bytes, text_document
from terakoya.corpus.files import HashingReader, RemoteFile, Source, compression_of, format_of, open_decompressed
from terakoya.errors import UserError, nearest

Record = tuple[int, bytes, bool]
"""The first line's number, the content, and whether it is over the limit (it is then cut short)."""

_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
# A blank line: spaces, tabs, carriage returns and ideographic spaces (U+3000, three bytes in UTF-8) only.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BLANK = re.compile(rb"(?:[ \t\r\n]|\xe3\x80\x80)*\Z")
_UNCLOSED = "expected a closing quote, the file ends without one; mend the file"
_OPENING = re.compile(rb'[,\r\n]"')


class Quotes:
    """Follows the quotes of a csv file (RFC 4180) through pieces of its bytes."""

    def __init__(self) -> None:
        self._inside = self._maybe_closed = False
        self._at_field_start = True
        self._first = True

    @property
    def open(self) -> bool:
        """Whether a line ending here is part of a field."""
        return self._inside and not self._maybe_closed

    def feed(self, piece: bytes) -> None:
        """Moves on over `piece`."""
        if not piece:
            return
        at = 0
        if self._first:
            self._first = False
            at = len(_BOM) if piece.startswith(_BOM) else 0
        while at < len(piece):
            if self._maybe_closed:
                self._maybe_closed = False
                if piece[at : at + 1] == b'"':  # doubled: a quote inside the field
                    at += 1
                else:
                    self._inside = False
                    self._at_field_start = False
            elif self._inside:
                found = piece.find(b'"', at)
                if found < 0:
                    return
                at, self._maybe_closed = found + 1, True
            elif self._at_field_start and piece[at : at + 1] == b'"':
                at, self._inside = at + 1, True
            else:
                opening = _OPENING.search(piece, at)
                if opening is None:
                    self._at_field_start = piece.endswith((b",", b"\n", b"\r"))
                    return
                at, self._inside = opening.end(), True


def split_into_blocks(
    file: Source,
    block_bytes: int,
    *,
    by_paragraph: bool,
    field: str,
    max_document_bytes: int,
    hashing: list[HashingReader] | None = None,
) -> Iterator[Block]:
    """Cuts a text file into blocks in one pass; see `Corpus.blocks`, and `open_decompressed` for `hashing`."""
    column, columns = _find_column(file, field) if format_of(file) in ("csv", "tsv") else (0, 0)
    keep = compression_of(file) is not None or isinstance(file, RemoteFile)
    room = block_bytes + max_document_bytes + 8
    start, line, disk, last = 0, 1, 0, 1
    size = file.stat().st_size
    quotes = Quotes() if format_of(file) == "csv" else None
    with open_decompressed(file, hashing) as (stream, raw):
        while True:
            bytes_read, newlines, data = _read_one_block(stream, block_bytes, by_paragraph, quotes, room if keep else 0)
            if not bytes_read:
                if quotes is not None and quotes.open:
                    raise UserError(f"{file}, after line {last}: {_UNCLOSED}")
                return
            last = line
            disk_stop = raw.tell() if bytes_read >= block_bytes else size
            content = data if keep else None
            yield Block(file, start, start + bytes_read, line, disk_stop - disk, content, column, columns)
            start, line, disk = start + bytes_read, line + newlines, disk_stop


def _read_one_block(
    stream: io.BufferedIOBase, block_bytes: int, by_paragraph: bool, quotes: Quotes | None, room: int
) -> tuple[int, int, bytes]:
    """Moves `stream` over one block. Returns its bytes, its newlines, and its content (nothing if `room` is 0).

    The document that the cut falls into belongs to this block; of one over the limit only so much is kept, up to
    `room` bytes of a block, as shows that it is over the limit.
    """
    kept = bytearray()
    count = newlines = 0

    def take(piece: bytes, room: int) -> bytes:
        nonlocal count, newlines
        count += len(piece)
        newlines += piece.count(b"\n")
        if len(kept) < room:
            kept.extend(piece)
        if quotes is not None:
            quotes.feed(piece)
        return piece

    while count < block_bytes:
        if not take(stream.read(min(_READ_BYTES, block_bytes - count)), min(room, block_bytes)):
            return count, newlines, bytes(kept)
    is_first = True
    while True:
        whole_line = True
        piece = take(stream.readline(_READ_BYTES), room)
        blank = bool(_BLANK.match(piece))
        while piece and not piece.endswith(b"\n"):
            piece, whole_line = take(stream.readline(_READ_BYTES), room), False
        ends = not (by_paragraph or (quotes is not None and quotes.open))
        if not piece or ends or (by_paragraph and blank and whole_line and not is_first):
            return count, newlines, bytes(kept)
        is_first = False


def read_block(
    block: Block, *, by_paragraph: bool, field: str, max_document_bytes: int, conversations: bool = False
) -> Iterator[Document | Reject]:
    """The documents and rejects of a block of a text file; see `Corpus.read`."""
    file, limit, kind = block.file, max_document_bytes, format_of(block.file)
    with io.BytesIO(block.data) if block.data is not None else file.open("rb") as stream:
        if block.data is None:
            stream.seek(block.start)
        quotes = Quotes() if kind == "csv" else None
        lines = _lines(stream, block, limit, quotes.feed if quotes is not None else None)
        if by_paragraph:
            records = _paragraphs(lines, limit)
        elif quotes is not None:
            whole = block.data is None or len(block.data) == block.stop - block.start
            records = _csv_records(lines, quotes, limit, file if whole else None)
        else:
            records = ((line, record, len(record) > limit) for line, record, _ in lines)
        if kind in ("csv", "tsv"):
            if block.start == 0:
                next(records, None)  # the names of the columns
            csv.field_size_limit(sys.maxsize)  # our own limit is looked at before
        for line, record, too_large in records:
            if too_large:
                yield reject_bytes(file, line, "document too large", record)
            elif _BLANK.match(record):
                continue
            elif kind == "jsonl":
                yield _from_json(file, line, record, None if conversations else field)
            elif kind == "txt":
                yield _from_txt(file, line, record)
            else:
                yield _from_row(block, line, record)


# ------------------------------------------------------------------------------------------------- one document each


def _from_txt(file: Source, line: int, record: bytes) -> Document | Reject:
    try:
        return Document(record.decode(), file, line)
    except UnicodeDecodeError:
        return reject_bytes(file, line, "bad UTF-8", record)


def _from_json(file: Source, line: int, record: bytes, field: str | None) -> Document | Reject:
    """The text under `field`, or with None the conversation that the object is."""
    try:
        value = orjson.loads(record)
    except orjson.JSONDecodeError:
        return reject_bytes(file, line, _not_json(record), record)
    if not isinstance(value, dict):
        return reject_bytes(file, line, "not a JSON object", record)
    if field is None:
        return conversation_document(file, line, value, record)
    if field not in value:
        return reject_bytes(file, line, "missing field", record)
    text = value[field]
    if not isinstance(text, str):
        return reject_bytes(file, line, "field is not a string", record)
    if not text or text.isspace():
        return reject_bytes(file, line, "empty document", record)
    return Document(text, file, line)


def _from_row(block: Block, line: int, record: bytes) -> Document | Reject:
    try:
        row = _split_row(block.file, record)
    except UnicodeDecodeError:
        return reject_bytes(block.file, line, "bad UTF-8", record)
    except csv.Error:
        return reject_bytes(block.file, line, "bad CSV", record)
    if len(row) != block.columns:
        return reject_bytes(block.file, line, "wrong number of columns", record)
    return text_document(block.file, line, row[block.column])


def _split_row(file: Source, record: bytes) -> list[str]:
    """The fields of a row. In tsv a quote is an ordinary character, as in IANA's text/tab-separated-values."""
    text = record.decode()
    return text.split("\t") if format_of(file) == "tsv" else next(csv.reader([text], strict=True))


def _find_column(file: Source, field: str) -> tuple[int, int]:
    """Which column is named `field`, and how many there are. UserError if none is."""
    with open_decompressed(file) as (stream, _):
        quotes, header = Quotes(), b""
        while piece := stream.readline(_READ_BYTES):
            quotes.feed(piece)
            header += piece
            if len(header) > _READ_BYTES or (piece.endswith(b"\n") and not (format_of(file) == "csv" and quotes.open)):
                break
    try:
        names = _split_row(file, header.removeprefix(_BOM).removesuffix(b"\n").removesuffix(b"\r"))
    except (UnicodeDecodeError, csv.Error, StopIteration) as error:
        raise UserError(f"{file}: expected the columns' names in its first line, got {header[:80]!r}") from error
    if names.count(field) != 1:
        found = f"{names.count(field)} of them" if field in names else f"none{nearest(field, names)}"
        raise UserError(f'{file}: expected one column named "{field}", got {found}; choose with --field')
    return names.index(field), len(names)


def _not_json(record: bytes) -> Reason:
    """Why orjson refuses `record`."""
    try:
        text = record.decode()
    except UnicodeDecodeError:
        return "bad UTF-8"
    if _SURROGATE.search(text):
        with suppress(ValueError, RecursionError):
            json.loads(text)  # takes halves of characters
            return "lone surrogate"
    return "bad JSON"


# ------------------------------------------------------------------------------------------------- lines to records


def _lines(
    stream: io.BufferedIOBase, block: Block, limit: int, watch: Callable[[bytes], None] | None = None
) -> Iterator[tuple[int, bytes, int]]:
    """Yields each line of `block` as (number, content, bytes with its ending); `watch` sees every piece before that.

    A line's content is cut short a little above `limit` bytes.
    """
    remaining = block.stop - block.start
    number = block.line
    while remaining > 0:
        line = tail = stream.readline(min(limit + len(_BOM) + 2, remaining))
        if not line:
            return
        if watch is not None:
            watch(line)
        size = len(line)
        while size < remaining and tail and not tail.endswith(b"\n"):
            tail = stream.readline(min(_READ_BYTES, remaining - size))
            size += len(tail)
            if watch is not None:
                watch(tail)
        remaining -= size
        if number == 1:
            line = line.removeprefix(_BOM)
        yield number, line.removesuffix(b"\n").removesuffix(b"\r"), size
        number += 1


def _paragraphs(lines: Iterator[tuple[int, bytes, int]], limit: int) -> Iterator[Record]:
    """Joins lines up to each blank one."""
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


def _csv_records(
    lines: Iterator[tuple[int, bytes, int]], quotes: Quotes, limit: int, file: Source | None
) -> Iterator[Record]:
    """Joins the lines of each row.

    UserError, if `file` is given, for a quote that is never closed: the rest of the file would be one large field.
    """
    first, size = 0, 0
    kept: list[bytes] = []
    for number, content, line_bytes in lines:
        if not size:
            first = number
        if size <= limit:
            kept.append(content)
        size += line_bytes
        if not quotes.open:
            record = b"\n".join(kept)
            yield first, record, len(record) > limit
            kept, size = [], 0
    if size and file is not None:
        raise UserError(f"{file}, line {first}: {_UNCLOSED}")
    if size:
        yield first, b"\n".join(kept), True

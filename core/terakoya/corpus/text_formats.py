"""Text formats: jsonl, txt, csv and tsv, split into blocks of whole documents and read line by line."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from terakoya.corpus.documents import (
    REMEDIES,
    Block,
    Document,
    Reason,
    RecordReader,
    Reject,
    choose_field,
    reject_bytes,
    text_document,
)
from terakoya.corpus.files import HashingReader, Source, compression_of, format_of
from terakoya.corpus.utf8_reader import open_text
from terakoya.errors import UserError, nearest

Record = tuple[int, bytes, bool]
"""The number of the first line, the content, and whether it is over the limit (then the content is cut short)."""

_READ_BYTES = 1 << 20
_FAR = 16 << 20
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
BLANK = re.compile(
    rb"(?:[\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)*\Z"
)
"""A blank line: only what `str.isspace` takes for white space, of which all but the first kind are bytes of UTF-8."""
_UNCLOSED = "expected a closing quote, the file ends without one; repair the file"
_OPENING = re.compile(rb'[,\r\n]"')


class QuoteTracker:
    """Tracks the quotes of a csv file (RFC 4180) through consecutive chunks of its bytes, from the start of a row."""

    def __init__(self, *, at_file_start: bool = True) -> None:
        self._inside = self._maybe_closed = False
        self._at_field_start = True
        self._may_have_bom = at_file_start

    @property
    def open(self) -> bool:
        """Whether a line ending at the current position is part of a field."""
        return self._inside and not self._maybe_closed

    def feed(self, chunk: bytes) -> None:
        """Moves the current position to the end of `chunk`."""
        if not chunk:
            return
        position = 0
        if self._may_have_bom:
            self._may_have_bom = False
            position = len(_BOM) if chunk.startswith(_BOM) else 0
        while position < len(chunk):
            if self._maybe_closed:
                self._maybe_closed = False
                if chunk[position : position + 1] == b'"':  # doubled: a quote inside the field
                    position += 1
                else:
                    self._inside = False
                    self._at_field_start = False
            elif self._inside:
                quote = chunk.find(b'"', position)
                if quote < 0:
                    return
                position, self._maybe_closed = quote + 1, True
            elif self._at_field_start and chunk[position : position + 1] == b'"':
                position, self._inside = position + 1, True
            else:
                opening = _OPENING.search(chunk, position)
                if opening is None:
                    self._at_field_start = chunk.endswith((b",", b"\n", b"\r"))
                    return
                position, self._inside = opening.end(), True


def split_into_blocks(
    file: Source,
    block_bytes: int,
    *,
    by_paragraph: bool,
    field: str,
    max_document_bytes: int,
    codec: str | None = None,
    hashing: list[HashingReader] | None = None,
) -> Iterator[Block]:
    """Splits a text file into blocks in one pass; see `Corpus.blocks`, and `open_text` for `codec` and `hashing`."""
    column, columns = _find_column(file, field, codec) if format_of(file) in ("csv", "tsv") else (0, 0)
    keep_data = compression_of(file) is not None or not isinstance(file, Path)
    max_data_bytes = block_bytes + max_document_bytes + 8
    start, line, disk, last = 0, 1, 0, 1
    size = file.stat().st_size
    quotes = QuoteTracker() if format_of(file) == "csv" else None
    with open_text(file, codec, hashing) as stream:
        while True:
            may_change = not stream.reader.passes_through
            bytes_read, newlines, data = _read_one_block(
                stream, block_bytes, by_paragraph, quotes, max_data_bytes if keep_data or may_change else 0
            )
            if not bytes_read:
                if quotes is not None and quotes.open:
                    raise UserError(f"{file}, after line {last}: {_UNCLOSED}")
                return
            last = line
            disk_stop = stream.disk_position if bytes_read >= block_bytes else size
            content = data if keep_data or stream.reader.is_changed else None
            yield Block(file, start, start + bytes_read, line, disk_stop - disk, content, column, columns)
            start, line, disk = start + bytes_read, line + newlines, disk_stop


def find_block(
    file: Path, low: int, high: int, *, by_paragraph: bool, field: str, codec: str | None = None
) -> Block | None:
    """Returns the documents of a jsonl, txt or tsv file that begin from byte `low` to before `high`, as a block without
    its line. None for a file that is not read as it is, and where the next document is far away."""
    with open_text(file, codec) as text:
        text.read(1)
        if text.reader.is_changed:
            return None
    column, columns = _find_column(file, field, codec) if format_of(file) == "tsv" else (0, 0)
    with file.open("rb") as stream:
        start, stop = (_find_start(stream, position, by_paragraph) for position in (low, high))
    if start is None or stop is None:
        return None
    return Block(file, start, stop, 1 if start == 0 else 0, stop - start, None, column, columns)


def _find_start(stream: io.BufferedIOBase, position: int, by_paragraph: bool) -> int | None:
    """Returns where the first document at or after byte `position` begins: after a blank line that is, or a line. None
    if that is more than `_FAR` bytes away."""
    if not position:
        return 0
    stream.seek(position - 1)
    is_whole = False
    while stream.tell() < position + _FAR:
        line = stream.readline(_READ_BYTES)
        is_end = not line or line.endswith(b"\n")
        if is_end and (not by_paragraph or not line or (is_whole and BLANK.match(line))):
            return stream.tell()
        is_whole = is_end
    return None


def _read_one_block(
    stream: io.BufferedIOBase, block_bytes: int, by_paragraph: bool, quotes: QuoteTracker | None, max_data_bytes: int
) -> tuple[int, int, bytes]:
    """Reads one block. Returns its number of bytes and of newlines, and its data (empty if `max_data_bytes` is 0).

    A document that goes over `block_bytes` belongs to this block as a whole. The data stop after `max_data_bytes`,
    which is enough to show that a document is over the limit.
    """
    data = bytearray()
    count = newlines = 0

    def add(chunk: bytes, max_bytes: int) -> bytes:
        nonlocal count, newlines
        count += len(chunk)
        newlines += chunk.count(b"\n")
        if len(data) < max_bytes:
            data.extend(chunk)
        if quotes is not None:
            quotes.feed(chunk)
        return chunk

    while count < block_bytes:
        if not add(stream.read(min(_READ_BYTES, block_bytes - count)), min(max_data_bytes, block_bytes)):
            return count, newlines, bytes(data)
    is_first = True
    while True:
        whole_line = True
        chunk = add(stream.readline(_READ_BYTES), max_data_bytes)
        blank = bool(BLANK.match(chunk))
        while chunk and not chunk.endswith(b"\n"):
            chunk, whole_line = add(stream.readline(_READ_BYTES), max_data_bytes), False
        ends = not (by_paragraph or (quotes is not None and quotes.open))
        if not chunk or ends or (by_paragraph and blank and whole_line and not is_first):
            return count, newlines, bytes(data)
        is_first = False


def read_block(
    block: Block, *, by_paragraph: bool, field: str, max_document_bytes: int, records: RecordReader | None = None
) -> Iterator[Document | Reject]:
    """Yields the documents and rejects of a block of a text file; see `Corpus.read`."""
    file, limit, format = block.file, max_document_bytes, format_of(block.file)
    with io.BytesIO(block.data) if block.data is not None else file.open("rb") as stream:
        if block.data is None:
            stream.seek(block.start)
        quotes = QuoteTracker(at_file_start=block.start == 0) if format == "csv" else None
        lines = _lines(stream, block, limit, quotes.feed if quotes is not None else None)
        if by_paragraph:
            found = _paragraphs(lines, limit)
        elif quotes is not None:
            whole = block.data is None or len(block.data) == block.stop - block.start
            found = _csv_records(lines, quotes, limit, file if whole else None)
        else:
            found = ((line, record, len(record) > limit) for line, record, _ in lines)
        if format in ("csv", "tsv"):
            if block.start == 0:
                next(found, None)  # the names of the columns
            csv.field_size_limit(sys.maxsize)  # our own limit was checked before
        for line, record, too_large in found:
            if too_large:
                yield reject_bytes(file, line, "document too large", record)
            elif BLANK.match(record):
                continue
            elif format == "jsonl":
                yield _from_json(file, line, record, records or field)
            elif format == "txt":
                yield _from_txt(file, line, record)
            else:
                yield _from_row(block, line, record)


# ------------------------------------------------------------------------------------------------- single documents


def _from_txt(file: Source, line: int, record: bytes) -> Document | Reject:
    try:
        return Document(record.decode(), file, line)
    except UnicodeDecodeError:
        return reject_bytes(file, line, "bad encoding", record)


def _from_json(file: Source, line: int, record: bytes, field: str | RecordReader) -> Document | Reject:
    """Returns the text under `field`, or what a `RecordReader` makes of the object."""
    try:
        value = orjson.loads(record)
    except orjson.JSONDecodeError:
        return reject_bytes(file, line, _json_error(record), record)
    if not isinstance(value, dict):
        return reject_bytes(file, line, "not a JSON object", record)
    if not isinstance(field, str):
        return field.read(file, line, value, record)
    if field not in value and (field := choose_field(field, value)) not in value:
        return reject_bytes(file, line, "missing field", record)
    text = value[field]
    if not isinstance(text, str | None):
        return reject_bytes(file, line, "field is not a string", record)
    return text_document(file, line, text)


def _from_row(block: Block, line: int, record: bytes) -> Document | Reject:
    try:
        row = _split_row(block.file, record)
    except UnicodeDecodeError:
        return reject_bytes(block.file, line, "bad encoding", record)
    except csv.Error:
        return reject_bytes(block.file, line, "bad CSV", record)
    if len(row) != block.columns:
        return reject_bytes(block.file, line, "wrong number of columns", record)
    return text_document(block.file, line, row[block.column])


def _split_row(file: Source, record: bytes) -> list[str]:
    """Returns the fields of a row. In tsv a quote is an ordinary character, as in IANA's text/tab-separated-values."""
    text = record.decode()
    return text.split("\t") if format_of(file) == "tsv" else next(csv.reader([text], strict=True))


def _find_column(file: Source, field: str, codec: str | None) -> tuple[int, int]:
    """Returns the index of the column `field` and the number of columns. UserError unless one column has that name."""
    with open_text(file, codec) as stream:
        quotes, header = QuoteTracker(), b""
        while chunk := stream.readline(_READ_BYTES):
            quotes.feed(chunk)
            header += chunk
            if len(header) > _READ_BYTES or (chunk.endswith(b"\n") and not (format_of(file) == "csv" and quotes.open)):
                break
    try:
        names = _split_row(file, header.removeprefix(_BOM).removesuffix(b"\n").removesuffix(b"\r"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: expected column names in the first line, got bytes that are not UTF-8; {REMEDIES['bad encoding']}"
        ) from error
    except (csv.Error, StopIteration) as error:
        raise UserError(f"{file}: expected column names in the first line, got {header[:80]!r}") from error
    field = choose_field(field, names)
    if field not in names:
        raise UserError(
            f'{file}: expected a column "{field}", got none{nearest(field, names)}; choose with --field, in '
            f"a corpus of several formats with --field {field},NAME"
        )
    if (count := names.count(field)) > 1:
        raise UserError(f'{file}: expected one column named "{field}", got {count} of them; choose with --field')
    return names.index(field), len(names)


def _json_error(record: bytes) -> Reason:
    """Returns why orjson refuses `record`."""
    if record.startswith(_BOM):
        return "byte order mark"
    try:
        text = record.decode()
    except UnicodeDecodeError:
        return "bad encoding"
    if _SURROGATE.search(text):
        with suppress(ValueError, RecursionError):
            json.loads(text)  # accepts lone surrogates
            return "lone surrogate"
    return "bad JSON"


# ------------------------------------------------------------------------------------------------- lines to records


def _lines(
    stream: io.BufferedIOBase, block: Block, limit: int, observe: Callable[[bytes], None] | None = None
) -> Iterator[tuple[int, bytes, int]]:
    """Yields each line of `block` as (number, content, size in bytes with its line ending).

    Calls `observe` with the bytes of a line before yielding it. A content is cut short a little above `limit` bytes.
    """
    remaining = block.stop - block.start
    number = block.line
    while remaining > 0:
        line = tail = stream.readline(min(limit + len(_BOM) + 2, remaining))
        if not line:
            return
        if observe is not None:
            observe(line)
        size = len(line)
        while size < remaining and tail and not tail.endswith(b"\n"):
            tail = stream.readline(min(_READ_BYTES, remaining - size))
            size += len(tail)
            if observe is not None:
                observe(tail)
        remaining -= size
        if number == 1:
            line = line.removeprefix(_BOM)
        yield number, line.removesuffix(b"\n").removesuffix(b"\r"), size
        number += 1


def _paragraphs(lines: Iterator[tuple[int, bytes, int]], limit: int) -> Iterator[Record]:
    """Joins the lines between blank lines."""
    first, size = 0, 0
    kept: list[bytes] = []
    for number, content, line_bytes in lines:
        if BLANK.match(content):
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
    lines: Iterator[tuple[int, bytes, int]], quotes: QuoteTracker, limit: int, file: Source | None
) -> Iterator[Record]:
    """Joins the lines of each row.

    If `file` is given, raises UserError for a quote that is not closed: the rest of the file would be one large field.
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

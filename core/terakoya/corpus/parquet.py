"""Parquet files: a block is one or more row groups, or a range of rows of a large one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from terakoya.corpus.documents import Block, Document, Reject, choose_field, reject_bytes, text_document
from terakoya.corpus.files import Source, import_pyarrow, raise_system_error
from terakoya.errors import UserError, nearest

_BATCH_BYTES = 4 << 20


def split_into_blocks(file: Source, block_bytes: int, *, field: str) -> Iterator[Block]:
    """Splits `file` into blocks of about `block_bytes` of text; reads only its footer.

    A block has several small row groups; the rows of a large one are divided evenly among several blocks, and reading
    such a block skips the rows before its own.
    """
    with _open_parquet(file, field) as (parquet, column):
        row, start, pending = 0, 0, 0
        spans: list[tuple[int, int]] = []
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            if not group.num_rows:
                continue
            size = group.column(column).total_uncompressed_size
            if row > start and pending + size > block_bytes:
                spans.append((start, row))
                start, pending = row, 0
            if size > block_bytes:
                count = min(group.num_rows, -(-size // block_bytes))
                ends = [row + group.num_rows * index // count for index in range(count + 1)]
                spans += itertools.pairwise(ends)
                start = row + group.num_rows
            else:
                pending += size
            row += group.num_rows
        if row > start:
            spans.append((start, row))
        disk, rows = file.stat().st_size, row
    for first, stop in spans:
        yield Block(file, first, stop, first + 1, disk * stop // rows - disk * first // rows)


def read_block(block: Block, *, field: str, max_document_bytes: int) -> Iterator[Document | Reject]:
    """Yields the documents and rejects of a block; the line of each is the number of its row, from 1."""
    with _open_parquet(block.file, field) as (parquet, column):
        names, row = [choose_field(field, parquet.schema_arrow.names)], 0
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            first, row = row, row + group.num_rows
            if row <= block.start or first >= block.stop or not group.num_rows:
                continue
            average = max(1, group.column(column).total_uncompressed_size // group.num_rows)
            rows = max(1, min(4096, _BATCH_BYTES // average))
            batch_start = first
            for batch in parquet.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                values = batch.column(0)
                skip = max(0, block.start - batch_start)
                for offset, value in enumerate(_bytes(values.slice(skip, max(0, block.stop - batch_start - skip)))):
                    yield _document(block.file, batch_start + skip + offset + 1, value, max_document_bytes)
                batch_start += len(values)
                if batch_start >= block.stop:
                    return


def first_rows(file: Source, count: int) -> list[dict[str, str]]:
    """Returns the texts of the first rows of `file`, at most `count` of them, by their columns: those of strings.
    Raises UserError if the file is broken."""
    with whole_parquet(file) as parquet:
        pa = import_pyarrow(file)
        names = [each.name for each in parquet.schema_arrow if _is_text(each.type, pa)]
        batch = next(parquet.iter_batches(count, columns=names, use_threads=False), None) if names else None
        columns = {name: _bytes(batch.column(place)) for place, name in enumerate(batch.schema.names)} if batch else {}
    rows = zip(*columns.values(), strict=True)
    return [{name: text for name, value in zip(columns, row, strict=True) if (text := _text(value))} for row in rows]


def _text(value: bytes | None) -> str:
    """Returns `value` as text, "" where it is none, such as the bytes of a picture."""
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        return ""


def _document(file: Source, row: int, value: bytes | None, limit: int) -> Document | Reject:
    if value is None:
        return text_document(file, row, None)
    if len(value) > limit:
        return reject_bytes(file, row, "document too large", value)
    try:
        return text_document(file, row, value.decode())
    except UnicodeDecodeError:
        return reject_bytes(file, row, "bad encoding", value)


def _bytes(values: Any) -> list[bytes | None]:
    """Returns the values of a column of strings undecoded, so that one bad string does not affect the others."""
    if hasattr(values, "dictionary"):  # a short file may hold a long text thousands of times
        texts = _bytes(values.dictionary)
        return [None if place is None else texts[place] for place in values.indices.to_pylist()]
    kind = "large_binary" if str(values.type).startswith("large") else "binary"
    return values.cast(kind).to_pylist()


@contextmanager
def _open_parquet(file: Source, field: str) -> Iterator[tuple[Any, int]]:
    """Yields the open file and the index of the column `field`. UserError for a broken file or a wrong column."""
    with whole_parquet(file) as parquet:
        names = parquet.schema_arrow.names
        field = choose_field(field, names)
        if field not in names:
            raise UserError(
                f'{file}: expected a column "{field}", got none{nearest(field, names)}; choose with --field, in '
                f"a corpus of several formats with --field {field},NAME"
            )
        if (many := names.count(field)) > 1:
            raise UserError(
                f'{file}: expected one column "{field}", got {many}; rename them, or choose another with --field'
            )
        kind = parquet.schema_arrow.field(field).type
        if not _is_text(kind, import_pyarrow(file)):
            raise UserError(f'{file}: column "{field}": expected strings, got {kind}; choose another with --field')
        paths = [parquet.schema.column(index).path for index in range(len(parquet.schema))]
        yield parquet, paths.index(field)


def _is_text(kind: Any, pa: Any) -> bool:
    """Returns whether a column of the type `kind` holds strings, as bytes without their mark too, or nulls alone, whose
    strings may be in other files of the corpus; `pa` is the package pyarrow."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    return any(getattr(pa.types, f"is_{name}")(value) for name in names)


@contextmanager
def whole_parquet(file: Source) -> Iterator[Any]:
    """Yields the open file. UserError where it is broken, also in what is read of it while the context is open; OSError
    where the system cannot read it."""
    pa = import_pyarrow(file)
    import pyarrow.parquet as pq

    with file.open("rb") as stream:
        try:
            yield pq.ParquetFile(stream, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise_system_error(error, file)
            raise UserError(
                f"{file}: expected a whole parquet file, got a broken one ({error}); get or make the file again"
            ) from error

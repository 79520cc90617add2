"""The parts of a corpus: blocks, and the documents and rejects in them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from terakoya.corpus.files import Source

Reason = str
"""Why a document was rejected, in a few words."""

REMEDIES: Mapping[str, str] = {
    "bad encoding": "name the encoding of files whose own is not recognised with --encoding, such as shift_jis, or "
    "convert them, as `iconv -f CP932 -t UTF-8` does",
    "byte order mark": "remove the bytes EF BB BF; files that begin with them were joined",
    "lone surrogate": "write whole characters; \\ud83d on its own is half of one",
    "bad JSON": "write one JSON object in each line, as `jq -c . FILE` does, or `jq -c '.[]' FILE` with an array",
    "missing field": "choose the key that holds the text with --field, read conversations with --conversations",
    "field is not a string": "choose the key that holds the text with --field",
    "wrong number of columns": "cells with line breaks or the separator stand in quotation marks in .csv; in .tsv "
    "these are text: save such a table as .csv",
    "document too large": "allow longer ones with --max-document-bytes",
    "special token in text": "choose how to treat them with --special-tokens-in-text",
}
"""What a user can do when there are many rejects for one reason."""

EXCERPT_CHARACTERS = 80


def choose_field(field: str, names: Container[str]) -> str:
    """Returns the key or column of `names` that holds the text: `field` itself, or the first of `text,body` that there
    is. Returns `field` if there is none."""
    if field in names:
        return field
    return next((name for name in map(str.strip, field.split(",")) if name in names), field)


@dataclass(frozen=True)
class Document:
    """One document: its text, without the line ending, and the line of `file` where it begins (in parquet the row),
    counted from 1."""

    text: str
    file: Source
    line: int


@dataclass(frozen=True)
class Reject:
    """Content that is not a document, with its file, its line and the reason."""

    file: Source
    line: int
    reason: Reason
    excerpt: str


@dataclass(frozen=True)
class Block:
    """Whole documents of one file, picklable.

    Attributes:
        start, stop: byte range in the file, after decompression and as UTF-8; in parquet a range of rows, from 0.
        line: the number of the first line or row, from 1.
        disk_bytes: the size of this block in the file on disk, for progress.
        data: the bytes themselves for compressed and for placed files, and for text that is not in UTF-8 on disk (a
            document over the limit is cut short but stays over the limit); None for other files, which the process that
            gets the block reads itself.
        column, columns: in csv and tsv, which column (from 0) holds the text, and how many there are.
        corpus: index (from 0) of its corpus where several corpora are read as one.
    """

    file: Source
    start: int
    stop: int
    line: int
    disk_bytes: int
    data: bytes | None = None
    column: int = 0
    columns: int = 0
    corpus: int = 0


class RecordReader(Protocol):
    """What reads the objects of jsonl lines as documents, the lower part of `components.record_format.RecordFormat`."""

    @property
    def name(self) -> str:
        """A word for the documents, in messages and in `Corpus.facts`."""

    @property
    def remedies(self) -> Mapping[str, str]:
        """What a user can do when there are many rejects, by reason."""

    def read(self, file: Source, line: int, value: Mapping[str, Any], record: bytes) -> Document | Reject:
        """Returns the object `value`, whose line is `record`, as a document or a reject."""


def reject_bytes(file: Source, line: int, reason: Reason, record: bytes) -> Reject:
    """Returns a reject with the beginning of `record`, which may contain any bytes."""
    excerpt = record[: 4 * EXCERPT_CHARACTERS].decode(errors="backslashreplace")[:EXCERPT_CHARACTERS]
    return Reject(file, line, reason, excerpt)


def text_document(file: Source, line: int, text: str | None) -> Document | Reject:
    """Returns the document `text`, or a reject if it is empty, only white space or null, as a blank cell is written."""
    if not text or text.isspace():
        return Reject(file, line, "empty document", (text or "")[:EXCERPT_CHARACTERS])
    return Document(text, file, line)

"""The files of a corpus as the report reads them: each for itself, with its encoding and the sites of documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.documents import Block, Document, Reject, choose_field, reject_bytes, text_document
from terakoya.corpus.encodings import ESCAPE, SAMPLE_BYTES, SHOWN, recognise
from terakoya.corpus.files import Source, format_of, open_decompressed

NOT_SURE = "not recognised"
_HOST = re.compile(r"[a-z][a-z0-9+.\-]*://(?:[^/?#@]*@)?(?:www\.)?([^/:?#]+)", re.IGNORECASE)


@dataclass(frozen=True)
class WebDocument(Document):
    """A document with the host of its `url`, "" without one."""

    host: str


@dataclass(frozen=True)
class UrlReader:
    """Reads the object of a line of jsonl as a `Corpus` does, and the host of its `url`, too. It implements
    `terakoya.corpus.documents.RecordReader`."""

    field: str
    name: str = "documents"

    @property
    def remedies(self) -> Mapping[str, str]:
        return {}

    def read(self, file: Source, line: int, value: Mapping[str, Any], record: bytes) -> Document | Reject:
        field = choose_field(self.field, value)
        if field not in value:
            return reject_bytes(file, line, "missing field", record)
        text = value[field]
        if not isinstance(text, str | None):
            return reject_bytes(file, line, "field is not a string", record)
        document = text_document(file, line, text)
        if isinstance(document, Reject):
            return document
        return WebDocument(document.text, file, line, _host(value))


def _host(value: Mapping[str, Any]) -> str:
    """Returns the host of the address under `url`, of the object itself or of its `meta` or `metadata`."""
    for each in (value, value.get("meta"), value.get("metadata")):
        if isinstance(each, Mapping) and isinstance(each.get("url"), str):
            match = _HOST.match(each["url"])
            return match[1].lower() if match else ""
    return ""


def split_files(corpus: Corpus) -> Iterator[Corpus]:
    """Yields a corpus for each file of `corpus`."""
    for file in corpus.sources:
        records = UrlReader(corpus.field) if format_of(file) == "jsonl" else None
        yield replace(corpus, sources=(file,), records=records, digests=None)


def read_block(corpus: Corpus, block: Block) -> tuple[list[Document], list[Reject]]:
    """Returns the documents and the rejects of `block`."""
    items = list(corpus.read(block))
    return [each for each in items if isinstance(each, Document)], [each for each in items if isinstance(each, Reject)]


def encoding_of(file: Source, codec: str | None) -> str:
    """Returns the encoding of `file`, as the reader recognises it; `codec` is what the user says. Raises UserError for
    a damaged file."""
    if format_of(file) == "parquet" or codec == "utf-8":
        return "UTF-8"
    with open_decompressed(file) as (stream, _):
        chunk = stream.read(SAMPLE_BYTES)
        while chunk.isascii() and b"\0" not in chunk and not ESCAPE.search(chunk):
            if len(chunk) < SAMPLE_BYTES:
                return "UTF-8"
            chunk = stream.read(SAMPLE_BYTES)
        sample = chunk + stream.read(SAMPLE_BYTES)
    found = recognise(sample, is_whole=len(sample) < 2 * SAMPLE_BYTES, codec=codec)
    return NOT_SURE if found is None else SHOWN.get(found, found.upper())

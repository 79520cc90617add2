"""Raw text as documents: jsonl, txt, csv, tsv and parquet, split into blocks that any process can read.

A block never splits a document and depends only on the files, so results do not depend on how many processes share the
blocks. Anything that is not a document is returned as a `Reject` with its file and line, never raised as an exception.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

from terakoya.corpus import parquet, text_formats
from terakoya.corpus.cleaning import Cleaning
from terakoya.corpus.documents import EXCERPT_CHARACTERS, Block, Document, Reason, RecordReader, Reject
from terakoya.corpus.encodings import find_codec
from terakoya.corpus.files import HashingReader, Source, content_hash, find_files, format_of, has_version
from terakoya.corpus.utf8_reader import tell_totals
from terakoya.errors import UserError
from terakoya.process_pool import available_cores

__all__ = ["EXCERPT_CHARACTERS", "Block", "Corpus", "Document", "Reading", "Reason", "Reject"]


logger = logging.getLogger("terakoya")


class Reading(TypedDict, total=False):
    """How a corpus is read: the options of `Corpus` that every command has which reads one."""

    documents: Literal["blank", "line"]
    field: str
    encoding: str | None
    max_rejects: int | float


@dataclass(frozen=True)
class Corpus:
    """Files of documents, in the given order. A source may be a folder (its corpus files, sorted by path), a pattern,
    or a place such as `s3://bucket/wiki`.

    `jsonl`: one object for each line, the text under `field`. `csv`, `tsv`, `parquet`: a row is a document, its text is
    in the column `field`. A `field` of several names, `text,body`, means the first of them that a line or a table has.
    `txt`: with `documents="blank"` blank lines separate documents, with `"line"` every line is one. Lines of white
    space only contain no document. A byte order mark at a file's start and carriage returns before line ends are
    dropped, and carriage returns alone end lines where those of a file's beginning end in nothing else; NUL and other
    control characters are kept. All but parquet may be compressed (.gz, .zst, .xz, .bz2). Text that is not UTF-8 is
    recognised, and where it is not, read in the `encoding` that is given (see `terakoya.corpus.encodings`). A document
    of more than `max_document_bytes` is rejected, in text formats without being read into memory. Who reads a corpus
    stops if more than `max_rejects`, a count (int) or a share (float), are rejected. `cleaning`
    changes and drops documents. `records` reads the object of each line of jsonl as a document, such as a conversation.
    If `digests` is given, `blocks` hashes the files as it reads them and stores the hashes there for `fingerprint`.

    Raises UserError for a missing file or an unknown file name ending, and for `records` that are not jsonl or have
    cleaning steps.
    """

    sources: Sequence[Source]
    _: KW_ONLY
    field: str = "text"
    documents: Literal["blank", "line"] = "blank"
    max_document_bytes: int = 100_000_000
    block_bytes: int = 4 << 20
    cleaning: Cleaning | None = None
    records: RecordReader | None = None
    encoding: str | None = None
    max_rejects: int | float = dataclass_field(default=0.01, compare=False)
    digests: dict[Source, str] | None = dataclass_field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.documents not in ("blank", "line"):
            raise UserError(f'documents: expected "blank" or "line", got "{self.documents}"')
        if self.max_document_bytes < 1 or self.block_bytes < 1:
            raise UserError("max_document_bytes and block_bytes: expected at least 1")
        object.__setattr__(self, "sources", find_files(self.sources))
        if self.encoding is not None:
            object.__setattr__(self, "encoding", find_codec(self.encoding))
        _warn_of_repeated(self.sources)
        not_jsonl = next((file for file in self.sources if format_of(file) != "jsonl"), None)
        if self.records is not None and not_jsonl is not None:
            raise UserError(
                f"{not_jsonl}: {self.records.name}: expected a jsonl file (.gz, .zst, .xz, .bz2 too), got another"
            )
        if self.records is not None and self.cleaning is not None:
            raise UserError(
                f"clean: cleaning steps work on plain text, not on {self.records.name}; leave one of them out"
            )

    @cached_property
    def total_bytes(self) -> int:
        """Total size of all files on disk, in bytes."""
        return sum(file.stat().st_size for file in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files' names, sizes and contents and of the cleaning steps, but not of the files' folders.

        Reads each file whole, once, unless an object store keeps a hash of it.
        """
        with ThreadPoolExecutor(min(4, available_cores())) as pool:
            hashes = list(pool.map(self._content_hash, self.sources))
        facts: list[Any] = [
            [file.name, file.stat().st_size, digest] for file, digest in zip(self.sources, hashes, strict=True)
        ]
        if self.cleaning is not None:
            facts.append(self.cleaning.settings)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def sizes_and_times(self) -> list[tuple[int, object]]:
        """Returns the size and the modification time of each file."""
        return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in self.sources)]

    def _content_hash(self, file: Source) -> str:
        if self.digests is None:
            return content_hash(file)
        if file not in self.digests:
            self.digests[file] = content_hash(file)
        return self.digests[file]

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that determines the documents, as JSON values: the files' contents and every option, but not the
        files' folders or the size of blocks."""
        return {
            "field": self.field,
            "documents": self.documents,
            "max_document_bytes": self.max_document_bytes,
            "cleaning": None if self.cleaning is None else self.cleaning.settings,
            "files": self.fingerprint,
            **({self.records.name: True} if self.records is not None else {}),
            **({"encoding": self.encoding} if self.encoding is not None else {}),
        }

    def blocks(self, *, block_bytes: int | None = None) -> Iterator[Block]:
        """Splits the files into blocks of about `block_bytes` (after decompression) at document boundaries.

        Reads every file once, in one pass and in bounded memory; only the footer of parquet. The blocks of compressed,
        of recoded and of placed files contain their bytes, so that each file is read once for any number of processes.

        Raises UserError for a damaged file, for a missing column, and for a file whose hash is not the one in
        `digests`.
        """
        size = block_bytes or self.block_bytes
        for file in self.sources:
            if format_of(file) == "parquet":
                yield from parquet.split_into_blocks(file, size, field=self.field)
                continue
            hashing: list[HashingReader] | None = None if self.digests is None or has_version(file) else []
            yield from text_formats.split_into_blocks(
                file,
                size,
                by_paragraph=self.is_by_paragraph(file),
                field=self.field,
                max_document_bytes=self.max_document_bytes,
                codec=self.encoding,
                hashing=hashing,
            )
            if hashing and self.digests is not None and hashing[0].count == file.stat().st_size:
                digest = hashing[0].digest()
                if self.digests.setdefault(file, digest) != digest:
                    raise UserError(f"{file}: was changed while it was read; leave the files alone and start again")
        tell_totals()

    def read(self, block: Block) -> Iterator[Document | Reject]:
        """Yields the documents and rejects of `block`, in order."""
        limit = self.max_document_bytes
        if format_of(block.file) == "parquet":
            items = parquet.read_block(block, field=self.field, max_document_bytes=limit)
        else:
            by_paragraph = self.is_by_paragraph(block.file)
            items = text_formats.read_block(
                block, by_paragraph=by_paragraph, field=self.field, max_document_bytes=limit, records=self.records
            )
        return items if self.cleaning is None else self.cleaning.apply(block, items)

    def is_by_paragraph(self, file: Source) -> bool:
        """Returns whether blank lines separate the documents of `file`."""
        return self.documents == "blank" and format_of(file) == "txt"


def _warn_of_repeated(files: Sequence[Source]) -> None:
    """Warns of files that several sources give, also by other paths: their documents count as often."""
    counts = Counter(str(file.resolve() if isinstance(file, Path) else file) for file in files)
    repeated = {name: count for name, count in counts.items() if count > 1}
    if repeated:
        name, count = min(repeated.items())
        logger.warning(
            "corpus: files are given more than once, and so are their documents: %s of them, such as %s (%s times)",
            f"{len(repeated):,}",
            name,
            f"{count:,}",
        )

"""A look at the beginnings of a corpus's files, before all of them are read: what separates documents, what is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal

from terakoya.corpus.corpus import Block, Corpus, Document
from terakoya.corpus.files import Source, format_of
from terakoya.corpus.rejects import Rejects
from terakoya.corpus.text_formats import BLANK
from terakoya.corpus.utf8_reader import open_text

logger = logging.getLogger("terakoya")

_SAMPLED_FILES = 16
_BEGINNING_BYTES = 1 << 18
_CERTAIN_REJECTS = 20
"""Fewer rejects in a part of a corpus say nothing about the share in all of it."""


def sample_files(files: Sequence[Source]) -> Sequence[Source]:
    """Returns up to 16 of `files`, evenly taken from all, and at least one of each format."""
    of_formats = {format_of(file): file for file in reversed(files)}
    return list(dict.fromkeys([*files[:: -(-len(files) // _SAMPLED_FILES)], *of_formats.values()]))


def first_block(corpus: Corpus, file: Source, block_bytes: int = 1 << 20) -> Block | None:
    """Returns the first block of `file`, one of `corpus`; None if it is empty."""
    single = replace(corpus, sources=(file,), digests=None)
    with closing(single.blocks(block_bytes=block_bytes)) as blocks:  # type: ignore[type-var]
        return next(iter(blocks), None)


def read_beginning(file: Source, codec: str | None = None) -> bytes:
    """Returns the first 256 KiB of the text of `file`, as UTF-8."""
    with open_text(file, codec) as stream:
        return stream.read(_BEGINNING_BYTES)


def check_beginnings(corpus: Corpus) -> None:
    """Tells what is no document at the beginnings of the files, and where lines are one document. Raises UserError for
    more rejects than `corpus.max_rejects`: before hours are spent on the rest."""
    rejects, disk_bytes = Rejects(), 0
    raw = corpus if corpus.cleaning is None else replace(corpus, cleaning=None)
    for file in sample_files(corpus.sources):
        block = first_block(raw, file)
        if block is not None:
            disk_bytes += block.disk_bytes
            texts = [item.text for item in raw.read(block) if not rejects.add(item) and isinstance(item, Document)]
            if format_of(file) == "tsv" and any(len(each) > 1 and each[0] == each[-1] == '"' for each in texts):
                logger.warning("%s: has texts in quotation marks, which are text in .tsv; save it as .csv", file)
    is_whole = disk_bytes >= corpus.total_bytes
    if is_whole or not rejects.documents or rejects.total >= _CERTAIN_REJECTS:
        rejects.check(corpus.max_rejects)
    else:
        rejects.tell()
    warn_of_one_document(corpus)


def find_separator(file: Source, codec: str | None = None) -> Literal["blank", "line"] | None:
    """Returns what separates the documents at the beginning of `file`, if that is txt: blank lines, or line ends if it
    has several lines and no blank one between them. None if it does not say."""
    if format_of(file) != "txt":
        return None
    lines = read_beginning(file, codec).strip().split(b"\n")
    return "blank" if any(map(BLANK.match, lines[1:])) else "line" if len(lines) > 1 else None


def warn_of_one_document(corpus: Corpus) -> None:
    """Warns of a txt file whose lines are one document because no blank line separates them."""
    if corpus.documents == "line":
        return
    for file in sample_files(corpus.sources):
        if find_separator(file, corpus.encoding) == "line":
            logger.warning(
                "%s: no blank line was seen, so its lines are one document; did you mean --documents line, where each "
                'line is one ("documents": "line" in a pipeline)?',
                file,
            )
            return

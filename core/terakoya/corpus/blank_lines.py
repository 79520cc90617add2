"""A look at the beginnings of txt files: do blank lines separate their documents?"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import Source, format_of, open_decompressed
from terakoya.corpus.text_formats import BLANK

logger = logging.getLogger("terakoya")

_SAMPLED_FILES = 16
_BEGINNING_BYTES = 1 << 18


def sample_files(files: Sequence[Source]) -> Sequence[Source]:
    """Returns up to 16 of `files`, evenly taken from all."""
    return files[:: max(1, len(files) // _SAMPLED_FILES)][:_SAMPLED_FILES]


def read_beginning(file: Source) -> bytes:
    """Returns the first 256 KiB of `file`, decompressed."""
    with open_decompressed(file) as (stream, _):
        return stream.read(_BEGINNING_BYTES)


def lacks_blank_lines(file: Source) -> bool:
    """Returns whether the beginning of `file`, if that is txt, has several lines and no blank one between them."""
    if format_of(file) != "txt":
        return False
    lines = read_beginning(file).strip().split(b"\n")
    return len(lines) > 1 and not any(map(BLANK.match, lines))


def warn_of_one_document(corpus: Corpus) -> None:
    """Warns of a txt file whose lines are one document because no blank line separates them."""
    if corpus.documents == "line":
        return
    file = next(filter(lacks_blank_lines, sample_files(corpus.sources)), None)
    if file is not None:
        logger.warning(
            "%s: no blank line was seen, so its lines are one document; did you mean --documents line, where each line "
            'is one ("documents": "line" in a pipeline)?',
            file,
        )

"""A look at places all over a corpus: sources that were joined one after the other differ, and so do documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from terakoya.corpus import text_formats
from terakoya.corpus.beginnings import first_block
from terakoya.corpus.corpus import Block, Corpus, Document
from terakoya.corpus.files import Source, compression_of, format_of

_PLACES = 16
_MOST_FILES = 100


def read_samples(corpus: Corpus, sample_bytes: int = 4 << 20) -> Iterator[tuple[int, list[Document]]]:
    """Yields parts of `corpus`, each as its bytes on disk and its documents, whose lines are not numbered.

    The parts are the documents that begin in places evenly spaced over the bytes of all files, about `sample_bytes`
    altogether: their mean size is that of all documents, however they are sorted. Of a file that can only be read from
    its beginning (compressed, csv, parquet, not on this machine, not in UTF-8, or cleaned), as much is read there.
    """
    total, share = max(1, corpus.total_bytes), -(-sample_bytes // _PLACES)
    size = min(share, -(-total // _PLACES))
    files_of = dict.fromkeys((total * number // _PLACES for number in range(_PLACES)), 0)
    begin = stop = 0
    for file in corpus.sources:
        begin, stop = stop, stop + file.stat().st_size
        places = [low for low in files_of if begin - size < low < max(stop, begin + 1) and files_of[low] < _MOST_FILES]
        blocks = [_find_block(corpus, file, max(low, begin) - begin, min(low + size, stop) - begin) for low in places]
        if None in blocks:
            blocks = [first_block(corpus, file, len(places) * share)]
        for low in places:
            files_of[low] += 1
        for block in filter(None, blocks):
            yield block.disk_bytes, [item for item in corpus.read(block) if isinstance(item, Document)]


def _find_block(corpus: Corpus, file: Source, low: int, high: int) -> Block | None:
    if not isinstance(file, Path) or format_of(file) in ("csv", "parquet") or compression_of(file) or corpus.cleaning:
        return None
    return text_formats.find_block(
        file, low, high, by_paragraph=corpus.is_by_paragraph(file), field=corpus.field, codec=corpus.encoding
    )

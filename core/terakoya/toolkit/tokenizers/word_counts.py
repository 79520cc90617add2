"""Counting words in parallel in bounded memory. Vocabularies are trained on these counts.

Beyond `max_words` entries the table is pruned as in lossy counting (Manku and Motwani, 2002,
https://www.vldb.org/conf/2002/S10P03.pdf): the rarest words are dropped, and the largest possible error of a count is
known and returned. Blocks are merged in the order of the corpus, so the table does not depend on the number of
processes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from terakoya.corpus.corpus import Block, Corpus, Document
from terakoya.corpus.files import format_of
from terakoya.corpus.rejects import Rejects
from terakoya.corpus.unread_text import count_unread, find_unread, warn_of_unread
from terakoya.errors import UserError
from terakoya.process_pool import in_order

Splitter = Callable[[str], Iterable[str]]
"""A function from a document to its words; `stops_at_nul`, if it has that, is as in `WordSplitter`."""

logger = logging.getLogger("terakoya")


@dataclass(frozen=True)
class WordCounts:
    """How often words occur in a corpus.

    Attributes:
        counts: word -> count. A count is never too high, and too low by at most `error`.
        words: the total number of running words.
        error: the largest error by pruning: every word that occurs more often is in the table. 0 is exact.
        documents: the number of counted documents.
        rejected: reason -> the number of items that could not be read as documents.
        text_bytes: bytes of the counted documents' text, as UTF-8.
    """

    counts: dict[str, int]
    words: int
    error: int
    documents: int
    rejected: dict[str, int]
    text_bytes: int

    def facts(self, max_words: int) -> dict[str, Any]:
        """Returns the facts of the table for the record of a tokenizer's training. Warns where counts are inexact."""
        if self.error:
            logger.warning(
                "more than %s distinct words: rare ones were dropped; each count is exact or at most %s too low",
                f"{max_words:,}",
                f"{self.error:,}",
            )
        return {
            "words": self.words,
            "distinct_words": len(self.counts),
            "count_error": self.error,
            "documents": self.documents,
            "rejected": self.rejected,
            "text_bytes": self.text_bytes,
        }


def count_words(
    corpus: Corpus,
    splitter: Callable[[], Splitter],
    *,
    processes: int = 1,
    max_words: int = 2_000_000,
    sample_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WordCounts:
    """Counts the words of `corpus`. Each process splits text with the function that `splitter()` returns (`splitter`
    must be picklable).

    Memory: about 200 bytes for each of `max_words` entries in this process, and a block of the corpus in each worker.
    With `sample_bytes`, about this many bytes of text (of parquet: on disk) are read, in blocks evenly distributed over
    the corpus.
    `progress(done_bytes, total_bytes)` counts bytes on disk. Warns of text that the splitter does not read.

    Raises UserError if a process dies, and for more rejects than the corpus allows.
    """
    if processes < 1 or max_words < 1 or (sample_bytes is not None and sample_bytes < 1):
        raise UserError("processes, max_words and sample_bytes: expected at least 1")
    merger = _Merger(max_words)
    unread: Counter[str] = Counter()
    done = 0
    calls = ((block, (block,)) for block in sample_blocks(corpus, sample_bytes))
    for block, counted in in_order(calls, processes, _BlockCounter, (corpus, splitter), task="counting words"):
        merger.add(counted)
        unread.update(counted.unread)
        done += block.disk_bytes
        if progress is not None:
            progress(done, corpus.total_bytes)
    if progress is not None:
        progress(corpus.total_bytes, corpus.total_bytes)
    warn_of_unread(unread)
    table = merger.result()
    merger.rejects.check(corpus.max_rejects)
    return table


@dataclass(frozen=True)
class _Counted:
    """The exact word counts of one block."""

    counts: dict[str, int]
    rejects: Rejects
    text_bytes: int
    unread: dict[str, int]


class _Merger:
    """The growing table."""

    def __init__(self, max_words: int) -> None:
        self._max_words = max_words
        self._counts: dict[str, int] = {}
        self.rejects = Rejects()
        self._words = self._error = self._text_bytes = 0

    def add(self, block: _Counted) -> None:
        """Adds a block's counts and prunes if there are too many words."""
        counts, get = self._counts, self._counts.get
        for word, count in block.counts.items():
            counts[word] = get(word, 0) + count
        self._words += sum(block.counts.values())
        self.rejects.update(block.rejects)
        self._text_bytes += block.text_bytes
        if len(counts) > self._max_words:
            self._prune()

    def _prune(self) -> None:
        """Drops the rarest words, at least half of `max_words`, so that pruning is not needed after every block."""
        values = np.fromiter(self._counts.values(), np.int64, len(self._counts))
        keep = self._max_words // 2
        limit = int(np.partition(values, len(values) - keep - 1)[len(values) - keep - 1])
        self._counts = {word: count for word, count in self._counts.items() if count > limit}
        self._error += limit

    def result(self) -> WordCounts:
        """Returns the current table."""
        return WordCounts(
            counts=self._counts,
            words=self._words,
            error=self._error,
            documents=self.rejects.documents,
            rejected=self.rejects.by_reason,
            text_bytes=self._text_bytes,
        )


class _BlockCounter:
    """Counts blocks; belongs to one process."""

    def __init__(self, corpus: Corpus, splitter: Callable[[], Splitter]) -> None:
        self._corpus, self._split = corpus, splitter()
        self._stops_at_nul = getattr(self._split, "stops_at_nul", False)

    def __call__(self, block: Block) -> _Counted:
        counts: Counter[str] = Counter()
        rejects = Rejects()
        unread: list[str] = []
        text_bytes = 0
        for item in self._corpus.read(block):
            rejects.add(item)
            if isinstance(item, Document):
                text_bytes += len(item.text.encode())
                counts.update(self._split(item.text))
                if self._stops_at_nul:
                    unread += find_unread(item.text)
        return _Counted(dict(counts), rejects, text_bytes, count_unread(unread))


def sample_blocks(corpus: Corpus, sample_bytes: int | None) -> Iterator[Block]:
    """Yields the blocks to read. The choice depends only on the corpus and `sample_bytes`."""
    block_bytes = max(1 << 16, min(4 << 20, corpus.total_bytes // 64))  # small enough to keep every process busy
    if sample_bytes is None:
        yield from corpus.blocks(block_bytes=block_bytes)
        return
    taken = disk = 0
    for block in corpus.blocks(block_bytes=max(1 << 16, min(block_bytes, sample_bytes // 64))):
        disk += block.disk_bytes
        if taken * corpus.total_bytes < sample_bytes * disk:
            in_rows = format_of(block.file) == "parquet"
            taken += block.disk_bytes if in_rows else block.stop - block.start
            yield block

"""SentencePiece's trainer, fed with the lines of documents, its refusals told as the user's errors."""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from terakoya.corpus.corpus import Corpus, Reject
from terakoya.errors import UserError

UNKNOWN_MARK = "▅"
"""The trainer leaves out sentences with this character, which it uses for itself."""
ERRORS = 2
"""The library's level of log from which on it writes to stderr: no remarks, no warnings."""

logger = logging.getLogger("terakoya")


class TrainingLines:
    """The lines of all documents that the trainer can take, to be gone through once; counts them and what is left out.

    Attributes:
        facts: `documents`, `lines` (what the trainer gets), `too_long`, `reserved`, `rejected`, `text_bytes`; right
            when all lines were taken.
    """

    facts: dict[str, int]

    def __init__(
        self,
        corpus: Corpus,
        *,
        max_bytes: int,
        most: int = 0,
        draw: int | None = None,
        change: Callable[[str], str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Lines of more than `max_bytes` are left out. At most `most` lines are taken (0: all): the first, or with a
        seed in `draw` some of the whole corpus. `change` makes what the trainer sees of a line."""
        self._corpus, self._max_bytes, self._most, self._draw = corpus, max_bytes, most, draw
        self._change, self._progress = change, progress
        self.facts = dict.fromkeys(("documents", "lines", "too_long", "reserved", "rejected", "text_bytes"), 0)

    def __iter__(self) -> Iterator[str]:
        lines = self._all()
        if self._most and self._draw is not None:
            lines = drawn(lines, self._most, seed=self._draw)
        elif self._most:
            lines = itertools.islice(lines, self._most)
        for line in lines:
            self.facts["lines"] += 1
            self.facts["text_bytes"] += len(line.encode())
            yield self._change(line) if self._change is not None else line

    def _all(self) -> Iterator[str]:
        """Every line that the trainer can take."""
        done = 0
        for block in self._corpus.blocks():
            for item in self._corpus.read(block):
                if isinstance(item, Reject):
                    self.facts["rejected"] += 1
                else:
                    self.facts["documents"] += 1
                    yield from self._lines(item.text)
            done += block.disk_bytes
            if self._progress is not None:
                self._progress(done, self._corpus.total_bytes)

    def _lines(self, text: str) -> Iterator[str]:
        for line in text.split("\n"):
            if not line or line.isspace():
                continue
            if UNKNOWN_MARK in line:
                self.facts["reserved"] += 1
            elif len(line.encode()) > self._max_bytes:
                self.facts["too_long"] += 1
            else:
                yield line

    def warn(self) -> None:
        """Tells what was left out."""
        if self.facts["too_long"]:
            logger.warning(
                "%s lines of more than %s bytes were left out of training; raise max_sentence_length to keep them",
                f"{self.facts['too_long']:,}",
                f"{self._max_bytes:,}",
            )
        if self.facts["reserved"]:
            logger.warning(
                "%s lines with %s, which the trainer keeps for itself, were left out of training",
                f"{self.facts['reserved']:,}",
                UNKNOWN_MARK,
            )


def drawn(lines: Iterable[str], count: int, *, seed: int) -> Iterator[str]:
    """`count` of `lines`, in their order; which ones is a function of the seed and of how many lines there are.

    The library's own draw is another one in each process. Holds `count` lines in memory, as the trainer does anyway.
    """
    kept: list[tuple[int, int, str]] = []  # the lines with the smallest keys, the largest of them first
    for number, line in enumerate(lines):
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
        entry = (-int.from_bytes(digest, "little"), number, line)
        if len(kept) < count:
            heapq.heappush(kept, entry)
        elif entry > kept[0]:
            heapq.heapreplace(kept, entry)
    for _, _, line in sorted(kept, key=lambda entry: entry[1]):
        yield line


def train_model(arguments: Mapping[str, Any], lines: Iterable[str]) -> bytes:
    """The trained model. Raises UserError for what the trainer refuses, and what `lines` raises."""
    import sentencepiece

    model = io.BytesIO()
    failed: list[BaseException] = []

    def guarded() -> Iterator[str]:
        try:
            yield from lines
        except BaseException as error:  # the library would make a text of it
            failed.append(error)
            raise

    sentencepiece.set_min_log_level(ERRORS)  # as an argument it comes too late for what is said about the arguments
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=guarded(), model_writer=model, minloglevel=ERRORS, **arguments
        )
    except (RuntimeError, ValueError) as error:
        if failed:
            raise failed[0] from None
        text = " ".join(str(error).split())
        if "sentences_.empty()" in text:
            text = "the corpus has no line to learn from"
        if "size too high" in text:
            text += " Or let it be smaller: hard_vocab_limit false."
        raise UserError(f"SentencePiece's trainer: {text.rpartition('] ')[2] or text}") from error
    return model.getvalue()

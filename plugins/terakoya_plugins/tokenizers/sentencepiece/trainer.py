"""Runs SentencePiece's trainer on the lines of documents and reports its errors as user errors."""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from terakoya.corpus.corpus import Corpus, Document
from terakoya.corpus.rejects import Rejects
from terakoya.errors import UserError

UNKNOWN_MARK = "▅"
"""The trainer skips sentences with this character, which it uses internally."""
LONGEST_LINE = 1 << 30
"""The trainer takes no larger `max_sentence_length`. Unit: bytes."""
ERROR_LEVEL = 2
"""The library's lowest log level that it writes to stderr: no information, no warnings."""

logger = logging.getLogger("terakoya")


class TrainingLines:
    """Iterates once over the lines of all documents that the trainer accepts; counts them and the skipped ones.

    Attributes:
        facts: `documents`, `lines` (given to the trainer), `too_long`, `reserved`, `rejected`, `text_bytes`; complete
            after the iteration.
    """

    facts: dict[str, int]

    def __init__(
        self,
        corpus: Corpus,
        *,
        max_bytes: int,
        max_lines: int = 0,
        sample_seed: int | None = None,
        change: Callable[[str], str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Skips lines of more than `max_bytes`. Yields at most `max_lines` lines (0: all): the first ones, or with
        `sample_seed` a sample of the whole corpus. `change` maps each line to what the trainer reads."""
        self._corpus, self._max_bytes, self._max_lines, self._sample_seed = corpus, max_bytes, max_lines, sample_seed
        self._change, self._progress = change, progress
        self._rejects = Rejects()
        self.facts = dict.fromkeys(("documents", "lines", "too_long", "reserved", "rejected", "text_bytes"), 0)

    def __iter__(self) -> Iterator[str]:
        lines = self._accepted_lines()
        if self._max_lines and self._sample_seed is not None:
            lines = sample_lines(lines, self._max_lines, seed=self._sample_seed)
        elif self._max_lines:
            lines = itertools.islice(lines, self._max_lines)
        for line in lines:
            self.facts["lines"] += 1
            self.facts["text_bytes"] += len(line.encode())
            yield self._change(line) if self._change is not None else line
        self._rejects.check(self._corpus.max_rejects)
        self.facts |= {"documents": self._rejects.documents, "rejected": self._rejects.total}

    def _accepted_lines(self) -> Iterator[str]:
        done = 0
        for block in self._corpus.blocks():
            for item in self._corpus.read(block):
                self._rejects.add(item)
                if isinstance(item, Document):
                    yield from self._accepted_lines_of(item.text)
            done += block.disk_bytes
            if self._progress is not None:
                self._progress(done, self._corpus.total_bytes)

    def _accepted_lines_of(self, text: str) -> Iterator[str]:
        for line in text.split("\n"):
            if not line or line.isspace():
                continue
            if UNKNOWN_MARK in line:
                self.facts["reserved"] += 1
            elif len(line.encode()) > self._max_bytes:
                self.facts["too_long"] += 1
            else:
                yield line

    def none_left(self) -> str:
        """Returns why the trainer has got no line, where it has got none."""
        if self.facts["too_long"]:
            return (
                f"no line is left to train on: {self.facts['too_long']:,} have more than {self._max_bytes:,} bytes; "
                "raise max_sentence_length, or end lines where sentences end"
            )
        if self.facts["reserved"]:
            return (
                f"no line is left to train on: {self.facts['reserved']:,} have {UNKNOWN_MARK}, which it uses internally"
            )
        return "the corpus has no line to train on"

    def warn(self) -> None:
        if self.facts["too_long"]:
            logger.warning(
                "%s lines of more than %s bytes were left out of training; raise max_sentence_length to keep them",
                f"{self.facts['too_long']:,}",
                f"{self._max_bytes:,}",
            )
        if self.facts["reserved"]:
            logger.warning(
                "%s lines with %s, which the trainer uses internally, were left out of training",
                f"{self.facts['reserved']:,}",
                UNKNOWN_MARK,
            )


def sample_lines(lines: Iterable[str], count: int, *, seed: int) -> Iterator[str]:
    """Yields a sample of `count` of `lines`, in order; it depends only on the seed and the number of lines.

    The library's own sample differs in each process. Holds `count` lines in memory, as the trainer does anyway.
    """
    kept: list[tuple[int, int, str]] = []  # a heap of the lines with the smallest keys, the largest key first
    for number, line in enumerate(lines):
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little")).digest()
        entry = (-int.from_bytes(digest, "little"), number, line)
        if len(kept) < count:
            heapq.heappush(kept, entry)
        elif entry > kept[0]:
            heapq.heapreplace(kept, entry)
    for _, _, line in sorted(kept, key=lambda entry: entry[1]):
        yield line


def train_model(arguments: Mapping[str, Any], lines: TrainingLines) -> bytes:
    """Returns the trained model. Raises UserError for errors of the trainer, and any error that `lines` raises."""
    import sentencepiece

    model = io.BytesIO()
    errors: list[BaseException] = []

    def guarded_lines() -> Iterator[str]:
        try:
            yield from lines
        except BaseException as error:  # the library would keep only its message
            errors.append(error)
            raise

    sentencepiece.set_min_log_level(ERROR_LEVEL)  # the argument comes too late for messages about the arguments
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=guarded_lines(), model_writer=model, minloglevel=ERROR_LEVEL, **arguments
        )
    except (RuntimeError, ValueError) as error:
        if errors:
            raise errors[0] from None
        text = " ".join(str(error).split())
        if "sentences_.empty()" in text:
            text = lines.none_left()
        if "size too high" in text:
            text += " Or allow a smaller one: hard_vocab_limit false."
        raise UserError(f"SentencePiece's trainer: {text.rpartition('] ')[2] or text}") from error
    return model.getvalue()

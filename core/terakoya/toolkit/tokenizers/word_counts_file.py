"""A file of word counts, which every tokenizer that splits the same corpus in the same way can train on.

The file: the line `terakoya word counts 1`, a line of JSON (corpus, splitter, totals), the counts as little-endian
int64, the words as UTF-8 separated by newlines. The same corpus gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from terakoya.atomic_files import write_atomically
from terakoya.corpus.corpus import Corpus
from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.word_counts import Splitter, WordCounts, count_words

_MAGIC = b"terakoya word counts 1\n"
_FACTS = ("words", "error", "documents", "rejected", "text_bytes")


@dataclass(frozen=True)
class Splitting:
    """How a corpus is split into words, and how many of them are counted.

    Attributes:
        splitter: see `count_words`; picklable.
        identity: everything on which the words depend, by name: the kind of splitter, its options, dictionary,
            versions.
        max_words, sample_bytes: see `count_words`.
    """

    splitter: Callable[[], Splitter]
    identity: Mapping[str, str]
    max_words: int = 2_000_000
    sample_bytes: int | None = None

    def facts(self) -> dict[str, Any]:
        """Returns everything that determines the counts of a corpus."""
        return {**self.identity, "max_words": self.max_words, "sample_bytes": self.sample_bytes}


@runtime_checkable
class WordCountTokenizer(Protocol):
    """A kind of tokenizer that trains on word counts, so that `terakoya tokenizer count` can count for it."""

    def splitting(self) -> Splitting:
        """Returns how words are counted for this tokenizer. Raises UserError for wrong settings."""


def load_or_count_words(
    corpus: Corpus,
    splitting: Splitting,
    *,
    file: Path | None = None,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> WordCounts:
    """Returns the word counts of `corpus`, read from `file` if given, else counted now; see `count_words`. Raises
    UserError for a file of another corpus or with other settings."""
    if file is not None:
        return read_counts(file, corpus, splitting)
    return count_words(
        corpus,
        splitting.splitter,
        processes=processes,
        max_words=splitting.max_words,
        sample_bytes=splitting.sample_bytes,
        progress=progress,
    )


def write_counts(file: Path, corpus: Corpus, splitting: Splitting, table: WordCounts) -> None:
    """Writes `table`, counted with `splitting` in `corpus`; `file` appears when it is complete."""
    assert not any("\n" in word for word in table.counts), "words contain no newline"
    counts = np.fromiter(table.counts.values(), "<i8", len(table.counts)).tobytes()
    words = "\n".join(table.counts).encode()
    header = {
        "corpus": corpus.facts,
        "splitting": splitting.facts(),
        "table": {name: getattr(table, name) for name in _FACTS},
        "distinct_words": len(table.counts),
        "sha256": hashlib.sha256(counts + words).hexdigest(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(file) as out:
        out.write(_MAGIC)
        out.write(json.dumps(header, ensure_ascii=False, sort_keys=True).encode() + b"\n")
        out.write(counts)
        out.write(words)


def read_counts(file: Path, corpus: Corpus, splitting: Splitting) -> WordCounts:
    """Returns the table in `file`. Raises UserError if it is broken, or does not match `splitting` and `corpus`."""
    if not file.is_file():
        raise UserError(f"{file}: expected a table of word counts, found no file; see `terakoya tokenizer count`")
    with file.open("rb") as stream:
        if stream.readline(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{file}: expected a table that `terakoya tokenizer count` wrote, got something else")
        first, content = stream.readline(), stream.read()
    try:
        header = json.loads(first)
    except ValueError:
        header = {}
    if hashlib.sha256(content).hexdigest() != header.get("sha256"):
        raise UserError(f"{file}: the table is damaged or cut short; count again with `terakoya tokenizer count`")
    _compare(file, "settings", expected=splitting.facts(), got=header["splitting"])
    _compare(file, "corpus", expected=corpus.facts, got=header["corpus"])
    size = 8 * header["distinct_words"]
    words = content[size:].decode().split("\n") if size else []
    counts = np.frombuffer(content[:size], "<i8").tolist()
    return WordCounts(counts=dict(zip(words, counts, strict=True)), **header["table"])


def _compare(file: Path, what: str, *, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    for name in [*expected, *got]:
        if name not in expected or name not in got or expected[name] != got[name]:
            raise UserError(
                f"{file}: {what}: {name}: expected {_shorten(expected.get(name))}, got a table counted with "
                f"{_shorten(got.get(name))}; count again with `terakoya tokenizer count`, or leave counts out"
            )


def _shorten(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value[:12]}..."' if len(value) > 32 and value.isalnum() else f'"{value}"'
    return "none" if value is None else str(value)

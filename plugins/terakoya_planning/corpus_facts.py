"""A look at a corpus: formats, keys of the text, language and size, from samples."""

from __future__ import annotations

import csv
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import orjson

from terakoya.corpus.beginnings import check_beginnings, find_separator, read_beginning, sample_files
from terakoya.corpus.corpus import Corpus
from terakoya.corpus.encodings import find_codec
from terakoya.corpus.files import Source, find_files, format_of
from terakoya.corpus.parquet import first_rows
from terakoya.corpus.samples import read_samples
from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

SEVERAL_FILES, SMALL_FILE = 8, 20_000
"""Where so many of the txt files that are looked at have no blank lines, and half of them fewer bytes than this, each
is a document, such as a mail: a corpus of a sentence a line is in few and large files."""
_KANA = re.compile(r"[\u3040-\u30ff]")
_LATIN = re.compile(r"[A-Za-z]")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uff00-\uffef\u3000-\u303f]")


@dataclass(frozen=True)
class CorpusFacts:
    """What a corpus seems to hold; the numbers are extrapolated from samples.

    Attributes:
        files: number of files.
        formats: the formats of the files, such as `jsonl`, sorted.
        size: bytes on disk.
        field: the keys or columns that hold the text, as `--field` takes them: `text,body`.
        documents: what separates documents in txt files.
        characters: characters of all text.
        count: number of documents.
        language: `ja`, `en` (mostly Latin letters) or `other`.
        japanese: the share of Japanese characters in the text.
    """

    files: int
    formats: tuple[str, ...]
    size: int
    field: str
    documents: Literal["blank", "line"]
    characters: int
    count: int
    language: Literal["ja", "en", "other"]
    japanese: float


def look_at(
    sources: Sequence[Path | str],
    *,
    field: str | None = None,
    encoding: str | None = None,
    max_rejects: int | float = 0.01,
) -> CorpusFacts:
    """Returns the facts of the corpus `sources`: files, folders, patterns and places. The others: see `Corpus`; without
    `field` the keys and columns that seem to hold the text are found. Raises UserError if a file is missing or damaged,
    no text is found, or more than `max_rejects` is none."""
    files, codec = find_files(sources), None if encoding is None else find_codec(encoding)
    sampled = sample_files(files)
    fields = [field] if field else _choose_fields({file: _lengths(file, codec) for file in sampled})
    separators = [find_separator(file, codec) for file in sampled]
    counts = Counter(separators)
    documents: Literal["blank", "line"] = "line" if counts["line"] > counts["blank"] else "blank"
    of_lines = [
        len(read_beginning(file, codec)) for file, each in zip(sampled, separators, strict=True) if each == "line"
    ]
    if len(of_lines) >= SEVERAL_FILES and median(of_lines) < SMALL_FILE:
        documents = "blank"
    if documents == "line" and counts["blank"]:
        odd = sampled[separators.index("blank")]
        logger.warning(
            "%s: has blank lines between its documents, and most txt files do not: each of its lines is taken for one; "
            'give it a corpus of its own ("corpora" in a pipeline)',
            odd,
        )
    if not fields and all(format_of(file) != "txt" for file in sampled):
        raise UserError(f"{files[0]}: expected text in a key or a column, found none")
    field = ",".join(fields) or "text"
    corpus = Corpus(files, field=field, documents=documents, encoding=encoding, max_rejects=max_rejects)
    check_beginnings(corpus)
    read_bytes, texts = 0, list[str]()
    for disk_bytes, found in read_samples(corpus):
        read_bytes += disk_bytes
        texts += (document.text for document in found)
    characters = sum(map(len, texts))
    if not characters:
        raise UserError(f"{files[0]}: expected at least one document, got an empty corpus; give files that hold text")
    factor = corpus.total_bytes / max(1, read_bytes)
    sample = "".join(text[:2000] for text in texts)[:1_000_000]
    japanese = len(_JAPANESE.findall(sample)) / len(sample)
    is_japanese = len(_KANA.findall(sample)) > 0.05 * len(sample)
    language: Literal["ja", "en", "other"] = (
        "ja" if is_japanese else "en" if len(_LATIN.findall(sample)) > 0.5 * len(sample) else "other"
    )
    return CorpusFacts(
        files=len(files), formats=tuple(sorted({str(format_of(file)) for file in files})), size=corpus.total_bytes,
        field=field, documents=documents, characters=round(characters * factor), count=round(len(texts) * factor),
        language=language, japanese=japanese,
    )  # fmt: skip


def _choose_fields(files: Mapping[Source, Counter[str]]) -> list[str]:
    """Returns the keys or columns with the longest texts of the `files`, those first that hold most in all of them:
    what a file has of the first is read. Warns of a file that has longer texts elsewhere."""
    longest = {file: max(lengths, key=lambda key: lengths[key]) for file, lengths in files.items() if lengths}
    total = sum(files.values(), Counter[str]())
    fields = sorted(dict.fromkeys(longest.values()), key=lambda key: -total[key])
    for file, own in longest.items():
        if (first := next(each for each in fields if each in files[file])) != own:
            logger.warning(
                '%s: %s is read, as in other files, and %s has longer texts; give it a corpus of its own ("corpora" in '
                "a pipeline), or name the column with --field",
                file,
                first,
                own,
            )
    return fields


def _lengths(file: Source, codec: str | None) -> Counter[str]:
    """Returns how long the texts of each key or column of `file` are; `text` counts ten times, as that is its name.
    Nothing for txt."""
    lengths: Counter[str] = Counter()
    for row in _rows(file, codec):
        for key, value in row.items():
            if isinstance(value, str) and value:
                lengths[key] += len(value) * (10 if key == "text" else 1)
    return lengths


def _rows(file: Source, codec: str | None) -> Iterator[Mapping[str, Any]]:
    """Yields the first rows of `file`, as objects."""
    kind = format_of(file)
    if kind == "parquet":
        yield from first_rows(file, 50)
        return
    if kind == "txt":
        return
    lines = read_beginning(file, codec).decode("utf-8-sig", "replace").splitlines()[:200]
    if kind == "jsonl":
        for line in lines:
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # the last line is cut; `prepare` counts and shows others
            if isinstance(value, dict):
                yield value
        return
    csv.field_size_limit(sys.maxsize)
    if kind == "tsv":
        yield from csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        yield from csv.DictReader(lines)

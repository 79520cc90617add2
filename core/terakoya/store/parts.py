"""Parts: what one task of `prepare` writes, completely or not at all, until all parts are joined into a store.

A part is `000007.part` (ids, sequence lengths, sequences of each document, word-start bits, rejects, answer bits, sizes
of documents, one after the other) and `000007.json`, written after it, with the counts that say where each section
starts, and hashes. A damaged part counts as not finished.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson

from terakoya.atomic_files import as_bytes, dump_hashed_json, load_hashed_json, write_atomically
from terakoya.components import EncodedDocuments
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.corpus import Reject
from terakoya.errors import UserError
from terakoya.store.document_sizes import SIZES
from terakoya.store.token_store import LEARNED, SIZES_KNOWN, WORDS, Counts, Unit

SECTIONS = ("ids", "lengths", "documents", "words", "rejects", "answers", "sizes")
_CHUNK = 4 << 20


@dataclass(frozen=True)
class PartFacts:
    """The counts of a part.

    Attributes:
        source: which block of the corpus the part was made from, so that parts are never confused.
        sections: bytes of each section, in the order of `SECTIONS`; `hashes` are their SHA-256.
        counts: the sums over its documents.
    """

    source: str
    dtype: str
    sections: tuple[int, ...]
    hashes: tuple[str, ...]
    counts: Counts


def part_files(folder: Path, number: int) -> tuple[Path, Path]:
    """Returns the data file and the facts file of part `number`."""
    return folder / f"{number:06d}.part", folder / f"{number:06d}.json"


def read_part(folder: Path, number: int, *, check: bool = True) -> PartFacts | None:
    """Returns the facts of part `number`, None if the part is not finished or damaged. Without `check` the data are not
    read."""
    data_file, facts_file = part_files(folder, number)
    try:
        raw = load_hashed_json(facts_file.read_bytes())
        counts = Counts(**{**raw["counts"], "known": frozenset(raw["counts"]["known"])})
        facts = PartFacts(raw["source"], raw["dtype"], tuple(raw["sections"]), tuple(raw["hashes"]), counts)
        if len(facts.sections) != len(SECTIONS) or data_file.stat().st_size != sum(facts.sections):
            return None
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # not there, cut, or of another version
        return None
    try:
        for name in SECTIONS if check else ():
            for _ in read_section(folder, number, facts, name):
                pass
    except UserError:
        return None
    return facts


def read_section(folder: Path, number: int, facts: PartFacts, name: str) -> Iterator[bytes]:
    """Yields the bytes of one section of part `number`, in chunks of whole elements. Raises UserError after the last
    chunk if they do not have their hash."""
    index = SECTIONS.index(name)
    remaining = facts.sections[index]
    if not remaining:
        return
    digest = hashlib.sha256()
    with part_files(folder, number)[0].open("rb") as stream:
        stream.seek(sum(facts.sections[:index]))
        while remaining and (chunk := stream.read(min(_CHUNK, remaining))):
            remaining -= len(chunk)
            digest.update(chunk)
            yield chunk
    if digest.hexdigest() != facts.hashes[index]:
        raise UserError(
            f"{part_files(folder, number)[0]}: content changed since it was written; run the same command again: it "
            "makes this part again and keeps the others"
        )


class PartBuilder:
    """Collects the encoded documents and the rejects of one part.

    `eos`, if given, is stored after each document (in line units at the end of its last line) and counts as a word
    start.
    """

    def __init__(self, vocabulary: Vocabulary, unit: Unit, eos: int | None) -> None:
        self._vocabulary, self._unit, self._eos = vocabulary, unit, eos
        self._dtype = vocabulary.dtype().newbyteorder("<")
        self._ids: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._documents: list[np.ndarray] = []
        self._flags: dict[str, list[np.ndarray]] = {WORDS: [], LEARNED: []}
        self._sizes: list[np.ndarray] = []
        self._known: frozenset[str] | None = None
        self._rejects: list[bytes] = []
        self._rejected: Counter[str] = Counter()
        self._literals: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self.tokens = 0

    def add(self, encoded: EncodedDocuments, *, sizes: np.ndarray | None = None) -> np.ndarray:
        """Appends the documents of `encoded` that have a token. Returns (D,) bool, True for these.

        An `eos` cannot be stored where it is marked which tokens are learned: they have their own ends. `sizes` (D, 2)
        are the characters of each document's text and its bytes in UTF-8.

        Raises UserError for an id outside the vocabulary.
        """
        ids, line_lengths = encoded.ids, encoded.line_lengths
        assert int(line_lengths.sum()) == len(ids), "line lengths do not add up to the ids"
        assert int(encoded.document_lines.sum()) == len(line_lengths), "document lines do not add up to the lines"
        assert not len(line_lengths) or int(line_lengths.min()) > 0, "a line has no token"
        if len(ids) and (int(ids.max()) >= self._vocabulary.size or int(ids.min()) < 0):
            bad = next(int(i) for i in ids if not 0 <= i < self._vocabulary.size)
            raise UserError(
                f"tokenizer: expected ids from 0 to {self._vocabulary.size - 1:,} (its vocabulary has "
                f"{self._vocabulary.size:,} entries), got {bad:,}; the tokenizer's files do not fit together"
            )
        line_ends = np.concatenate([[0], np.cumsum(line_lengths, dtype=np.int64)])
        document_ends = np.concatenate([[0], np.cumsum(encoded.document_lines, dtype=np.int64)])
        token_ends = line_ends[document_ends]
        kept = np.diff(token_ends) > 0
        if not kept.any():
            return kept
        flags = encoded.flags
        assert flags[LEARNED] is None or self._eos is None, "learned tokens have their own ends"
        known = frozenset(name for name, each in {**flags, SIZES_KNOWN: sizes}.items() if each is not None)
        assert self._known in (None, known), "known in some batches only"
        self._known = known
        if self._unit == "line":
            lengths, documents = line_lengths.astype("<i4"), encoded.document_lines[kept].astype("<i4")
            last = document_ends[1:][kept] - 1
        else:
            lengths = np.diff(token_ends)[kept].astype("<i4")
            documents, last = np.ones(len(lengths), dtype="<i4"), np.arange(len(lengths))
        if self._eos is not None:
            at = token_ends[1:][kept]
            ids = np.insert(ids, at, self._eos)
            flags = {name: None if each is None else np.insert(each, at, True) for name, each in flags.items()}
            lengths[last] += 1
        self._ids.append(ids.astype(self._dtype))
        self._lengths.append(lengths)
        self._documents.append(documents)
        for name, each in flags.items():
            if each is not None:
                assert len(each) == len(ids), "flags do not fit the ids"
                self._flags[name].append(each.astype(bool))
        if sizes is not None:
            self._sizes.append(sizes[kept].astype(SIZES))
        self._literals.update(encoded.literals)
        self._notes.update(encoded.notes)
        self.tokens += len(ids)
        return kept

    def reject(self, reject: Reject) -> None:
        """Records a document that is rejected."""
        self._rejected[reject.reason] += 1
        record = {**asdict(reject), "file": str(reject.file)}
        self._rejects.append(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

    def write(self, folder: Path, number: int, source: str) -> PartFacts:
        """Writes part `number` of `folder` durably, its facts last."""
        lengths, documents = _concatenate(self._lengths, "<i4"), _concatenate(self._documents, "<i4")
        words, learned = (np.packbits(_concatenate(each, "?"), bitorder="little") for each in self._flags.values())
        sections: list[np.ndarray | bytes] = [_concatenate(self._ids, self._dtype), lengths, documents, words]
        sizes = np.concatenate([*self._sizes, np.empty((0, 2), SIZES)])
        sections += [b"".join(self._rejects), learned, sizes]
        facts = PartFacts(
            source=source,
            dtype=self._dtype.name,
            sections=tuple(as_bytes(section).nbytes for section in sections),
            hashes=tuple(hashlib.sha256(as_bytes(section)).hexdigest() for section in sections),
            counts=Counts(
                self.tokens,
                len(lengths),
                len(documents),
                dict(sorted(self._rejected.items())),
                dict(sorted(self._literals.items())),
                dict(sorted(self._notes.items())),
                self._known or frozenset(),
            ),
        )
        data_file, facts_file = part_files(folder, number)
        with write_atomically(data_file) as out:
            for section in sections:
                out.write(section)
        with write_atomically(facts_file) as out:
            record = asdict(facts)
            record["counts"]["known"] = sorted(facts.counts.known)
            out.write(dump_hashed_json(record))
        return facts


def _concatenate(arrays: Iterable[np.ndarray], dtype: str | np.dtype) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays])

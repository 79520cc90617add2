"""Measures how tokenizers encode a text, for `terakoya tokenizer report`."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from terakoya.errors import UserError
from terakoya.folder_kinds import distinct_names
from terakoya_report.tokenizer_pieces import read_pieces

if TYPE_CHECKING:
    from terakoya.components import EncodedDocuments, Encoder, Tokenizer
    from terakoya.corpus.corpus import Corpus, Reading

BATCH_CHARACTERS = 1 << 20
MAX_WORD_TOKENS = 5
"""Words of this many tokens or more are counted together."""
CLASSES = ("hiragana", "katakana", "kanji", "latin", "digits", "punctuation", "symbols", "other")


@dataclass(frozen=True)
class Coverage:
    """How many characters of one class are known. Each is encoded on its own; it is known if no token is unknown."""

    characters: int
    known: int
    distinct: int
    distinct_known: int


@dataclass(frozen=True)
class TokenizerReport:
    """The measurements of one tokenizer on a text.

    Attributes:
        kind: name of the component that reads the folder.
        vocabulary: number of ids, special ones included; `special` of them are never text.
        documents, characters: numbers in the text that was read; line ends do not count.
        tokens: number of tokens of the text; `unknown` of them are the unknown token.
        words: number of words by number of tokens, 1 to 5 or more; None if the tokenizer does not know words.
        coverage: by class of characters, in the order of `CLASSES`, without classes that do not occur.
        counts: (vocabulary,) int64, how often each id occurs.
        pieces, lengths: (vocabulary,) the displayed piece of each id, and its number of characters (int64): see
            `terakoya_report.tokenizer_pieces.read_pieces`.
        ordinary: the ids that are neither special nor an unused slot.
    """

    name: str
    kind: str
    vocabulary: int
    special: int
    documents: int
    characters: int
    tokens: int
    unknown: int
    words: tuple[int, ...] | None
    coverage: dict[str, Coverage]
    counts: np.ndarray
    pieces: tuple[str, ...]
    lengths: np.ndarray
    ordinary: np.ndarray

    @property
    def characters_per_token(self) -> float:
        """Characters of text per token; 0 for an empty text."""
        return self.characters / self.tokens if self.tokens else 0.0

    @property
    def unknown_rate(self) -> float:
        """The share of tokens that are unknown; 0 for an empty text."""
        return self.unknown / self.tokens if self.tokens else 0.0

    @property
    def split_rate(self) -> float | None:
        """The share of words that have more than one token; None if words are not known."""
        if self.words is None or not sum(self.words):
            return None
        return 1 - self.words[0] / sum(self.words)

    @property
    def tokens_per_word(self) -> float | None:
        """Tokens per word; None if words are not known."""
        return self.tokens / sum(self.words) if self.words and sum(self.words) else None

    def longest(self, number: int) -> list[tuple[str, int]]:
        """Returns the longest pieces that occur, each with its count; of equal length the most frequent first."""
        used = self.ordinary[self.counts[self.ordinary] > 0].tolist()
        used.sort(key=lambda id: (-self.lengths[id], -self.counts[id], id))
        return [(self.pieces[id], int(self.counts[id])) for id in used[:number]]

    def unused_pieces(self) -> list[str]:
        """Returns the ordinary pieces that do not occur, in the order of their ids."""
        return [self.pieces[id] for id in self.ordinary[self.counts[self.ordinary] == 0].tolist()]

    def piece_lengths(self, longest: int = 10) -> list[int]:
        """Returns how many ordinary pieces have 1, 2, ... `longest` or more characters, without the marks of WordPiece
        and SentencePiece."""
        lengths = np.minimum(self.lengths[self.ordinary], longest)
        return [int(count) for count in np.bincount(lengths, minlength=longest + 1)[1:]]

    def share_of_most_frequent(self, numbers: Sequence[int]) -> list[float]:
        """Returns the share of the k most frequent ids in all tokens, for each k of `numbers`."""
        ordered = np.sort(self.counts)[::-1].cumsum()
        return [float(ordered[min(k, len(ordered)) - 1] / max(1, self.tokens)) for k in numbers]


def report_tokenizers(
    folders: Sequence[Path],
    corpus: Sequence[Path],
    *,
    sample_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **reading: Unpack[Reading],
) -> list[TokenizerReport]:
    """Measures the tokenizers in `folders` on the files `corpus`; the other arguments are as for `Corpus` and
    `measure_tokenizer`.

    Raises UserError as `Corpus`, `recognise_tokenizer` and `measure_tokenizer`.
    """
    from terakoya.corpus.corpus import Corpus
    from terakoya.plugins import registry
    from terakoya.tokenization.recognise import recognise_tokenizer

    text = Corpus([Path(file) for file in corpus], **reading)
    names = {registry().component("tokenizers", name): name for name in registry().names("tokenizers")}
    components = [recognise_tokenizer(Path(folder)) for folder in folders]
    reports = [
        measure_tokenizer(
            component, Path(folder), text, kind=names[type(component)], sample_bytes=sample_bytes, progress=progress
        )
        for folder, component in zip(folders, components, strict=True)
    ]
    labels = distinct_names([Path(folder) for folder in folders])
    return [replace(report, name=label) for report, label in zip(reports, labels, strict=True)]


def measure_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    corpus: Corpus,
    *,
    kind: str,
    sample_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenizerReport:
    """Encodes `corpus` with the tokenizer in `folder` and returns the measurements.

    With `sample_bytes`, reads about that many bytes of text, in blocks evenly distributed over the corpus. Memory does
    not grow with the corpus. `progress(done_bytes, total_bytes)` counts bytes on disk. Raises UserError for a corpus
    without documents.
    """
    from terakoya.corpus.corpus import Document
    from terakoya.corpus.rejects import Rejects
    from terakoya.toolkit.tokenizers.word_counts import sample_blocks

    encoder = tokenizer.encoder(folder)
    tally = _Tally(encoder)
    done, rejects = 0, Rejects()
    for block in sample_blocks(corpus, sample_bytes):
        batch: list[str] = []
        size = 0
        for item in corpus.read(block):
            rejects.add(item)
            if not isinstance(item, Document):
                continue
            batch.append(item.text)
            size += len(item.text)
            if size >= BATCH_CHARACTERS:
                tally.add(batch)
                batch, size = [], 0
        tally.add(batch)
        done += block.disk_bytes
        if progress is not None:
            progress(done, corpus.total_bytes)
    if not tally.documents and rejects.total:
        raise UserError(rejects.explain(corpus.max_rejects))
    rejects.tell()
    if not tally.documents:
        raise UserError("tokenizer report: expected a corpus with at least one document, found none")
    vocabulary = encoder.vocabulary
    pieces, lengths = read_pieces(tokenizer.load(folder), vocabulary.size)
    return TokenizerReport(
        name=folder.name,
        kind=kind,
        vocabulary=vocabulary.size,
        special=len(vocabulary.special),
        documents=tally.documents,
        characters=sum(tally.characters.values()),
        tokens=int(tally.counts.sum()),
        unknown=0 if vocabulary.unk is None else int(tally.counts[vocabulary.unk]),
        words=None if tally.words is None else tuple(tally.words.tolist()),
        coverage=_coverage(encoder, tally.characters),
        counts=tally.counts,
        pieces=pieces,
        lengths=lengths,
        ordinary=vocabulary.ordinary,
    )


class _Tally:
    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.documents = 0
        self.characters: Counter[str] = Counter()
        self.counts = np.zeros(encoder.vocabulary.size, np.int64)
        self.words: np.ndarray | None = np.zeros(MAX_WORD_TOKENS, np.int64)

    def add(self, documents: Sequence[str]) -> None:
        if not documents:
            return
        encoded = self._encoder.encode(documents)
        self.documents += len(documents)
        for text in documents:
            self.characters.update(text)
        del self.characters["\n"]
        self.counts += np.bincount(encoded.ids, minlength=len(self.counts))
        lengths = _word_lengths(encoded)
        if lengths is None or self.words is None:
            self.words = None
        else:
            self.words += np.bincount(np.minimum(lengths, MAX_WORD_TOKENS), minlength=MAX_WORD_TOKENS + 1)[1:]


def _word_lengths(encoded: EncodedDocuments) -> np.ndarray | None:
    if encoded.word_starts is None:
        return None
    starts = np.flatnonzero(encoded.word_starts)
    return np.diff(np.append(starts, len(encoded.ids)))


def _coverage(encoder: Encoder, characters: Counter[str]) -> dict[str, Coverage]:
    """Returns coverage by class of the characters that occur; ignores characters without a token (spaces)."""
    distinct = [character for character in characters if not character.isspace()]
    encoded = encoder.encode(distinct)
    ends = np.cumsum(encoded.line_lengths)
    tokens = np.diff(np.append(0, ends)[np.append(0, np.cumsum(encoded.document_lines))])
    owner = np.repeat(np.arange(len(distinct)), tokens)
    unknown = np.zeros(len(distinct), bool)
    if encoder.vocabulary.unk is not None:
        unknown[owner[encoded.ids == encoder.vocabulary.unk]] = True
    tallies = {name: [0, 0, 0, 0] for name in CLASSES}
    for number, character in enumerate(distinct):
        if tokens[number]:
            known = not unknown[number]
            tally = tallies[character_class(character)]
            tally[0] += characters[character]
            tally[1] += characters[character] * known
            tally[2] += 1
            tally[3] += known
    return {name: Coverage(*tally) for name, tally in tallies.items() if tally[0]}


def character_class(character: str) -> str:
    """Returns which of `CLASSES` a character belongs to, by its Unicode name and category."""
    name = unicodedata.name(character, "")
    category = unicodedata.category(character)
    if name.startswith(("CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "IDEOGRAPHIC ITERATION", "IDEOGRAPHIC CLOSING")):
        return "kanji"
    if category.startswith("P"):
        return "punctuation"
    if category.startswith("S"):
        return "symbols"
    if category.startswith("N"):
        return "digits"
    for prefix, name_class in (("HIRAGANA", "hiragana"), ("KATAKANA", "katakana"), ("HALFWIDTH KATAKANA", "katakana")):
        if name.startswith(prefix):
            return name_class
    return "latin" if "LATIN" in name else "other"

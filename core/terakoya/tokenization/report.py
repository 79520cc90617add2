"""What a tokenizer does to a text: measured for `terakoya tokenizer report`."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from terakoya.errors import UserError
from terakoya.tokenization.report_pieces import read_pieces

if TYPE_CHECKING:
    from terakoya.components import Encoded, Encoder, Tokenizer
    from terakoya.corpus.corpus import Corpus

BATCH_CHARACTERS = 1 << 20
LONGEST_WORD = 5
"""Words of so many tokens or more are counted together."""
CLASSES = ("hiragana", "katakana", "kanji", "latin", "digits", "punctuation", "symbols", "other")


@dataclass(frozen=True)
class Coverage:
    """How many characters of one class are known: each is encoded alone, and known if nothing of it is unknown."""

    characters: int
    known: int
    distinct: int
    distinct_known: int


@dataclass(frozen=True)
class TokenizerReport:
    """What one tokenizer makes of a text.

    Attributes:
        kind: the component that reads the folder.
        vocabulary: ids, special ones included; `special` of them are never text.
        documents, characters: of the text that was read; line ends do not count.
        tokens: of the text; `unknown` of them are the unknown token.
        words: of the text, by number of tokens from 1 to 5 or more; None where the tokenizer does not know words.
        coverage: by class of characters, in the order of `CLASSES`; classes that do not occur are left out.
        counts: (vocabulary,) int64, how often each id occurs.
        pieces, lengths: (vocabulary,) each id's piece as it is shown, and its characters (int64): see
            `terakoya.tokenization.report_pieces.read_pieces`.
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
        """Characters of text for each token; 0 of no text."""
        return self.characters / self.tokens if self.tokens else 0.0

    @property
    def unknown_rate(self) -> float:
        """The share of tokens that are unknown; 0 of no text."""
        return self.unknown / self.tokens if self.tokens else 0.0

    @property
    def split_rate(self) -> float | None:
        """The share of words of more than one token; None where words are not known."""
        if self.words is None or not sum(self.words):
            return None
        return 1 - self.words[0] / sum(self.words)

    @property
    def tokens_per_word(self) -> float | None:
        """Tokens for each word; None where words are not known."""
        return self.tokens / sum(self.words) if self.words and sum(self.words) else None

    def longest(self, number: int) -> list[tuple[str, int]]:
        """The longest pieces that occur, each with how often; of equal length the most frequent first."""
        used = self.ordinary[self.counts[self.ordinary] > 0].tolist()
        used.sort(key=lambda id: (-self.lengths[id], -self.counts[id], id))
        return [(self.pieces[id], int(self.counts[id])) for id in used[:number]]

    def never_used(self) -> list[str]:
        """The pieces that do not occur, in the order of their ids; special ones do not count."""
        return [self.pieces[id] for id in self.ordinary[self.counts[self.ordinary] == 0].tolist()]

    def piece_lengths(self, longest: int = 10) -> list[int]:
        """How many ordinary pieces have 1, 2, ... `longest` or more characters, without WordPiece's and
        SentencePiece's marks."""
        lengths = np.minimum(self.lengths[self.ordinary], longest)
        return [int(count) for count in np.bincount(lengths, minlength=longest + 1)[1:]]

    def share_of_most_frequent(self, numbers: Sequence[int]) -> list[float]:
        """The share of all tokens that the k most frequent ids make up, for each k of `numbers`."""
        ordered = np.sort(self.counts)[::-1].cumsum()
        return [float(ordered[min(k, len(ordered)) - 1] / max(1, self.tokens)) for k in numbers]


def measure_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    corpus: Corpus,
    *,
    kind: str,
    sample_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenizerReport:
    """Encodes `corpus` with the tokenizer in `folder` and counts.

    With `sample_bytes` about so many bytes of text are read, in blocks spread evenly over the corpus. Memory does not
    grow with the corpus. `progress(done_bytes, total_bytes)` counts bytes on disk. Raises UserError for a corpus
    without a document.
    """
    from terakoya.corpus.corpus import Reject
    from terakoya.toolkit.tokenizers.word_counts import sampled

    encoder = tokenizer.encoder(folder)
    tally = _Tally(encoder)
    done = 0
    for block in sampled(corpus, sample_bytes):
        batch: list[str] = []
        size = 0
        for item in corpus.read(block):
            if isinstance(item, Reject):
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
    """Counts of what has been encoded so far."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.documents = 0
        self.characters: Counter[str] = Counter()
        self.counts = np.zeros(encoder.vocabulary.size, np.int64)
        self.words: np.ndarray | None = np.zeros(LONGEST_WORD, np.int64)

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
            self.words += np.bincount(np.minimum(lengths, LONGEST_WORD), minlength=LONGEST_WORD + 1)[1:]


def _word_lengths(encoded: Encoded) -> np.ndarray | None:
    """The number of tokens of each word (n,); None where words are not known."""
    if encoded.word_starts is None:
        return None
    starts = np.flatnonzero(encoded.word_starts)
    return np.diff(np.append(starts, len(encoded.ids)))


def _coverage(encoder: Encoder, characters: Counter[str]) -> dict[str, Coverage]:
    """Coverage by class of the characters that occur; those that make no token at all (spaces) are left out."""
    alone = [character for character in characters if not character.isspace()]
    encoded = encoder.encode(alone)
    ends = np.cumsum(encoded.line_lengths)
    tokens = np.diff(np.append(0, ends)[np.append(0, np.cumsum(encoded.document_lines))])
    owner = np.repeat(np.arange(len(alone)), tokens)
    unknown = np.zeros(len(alone), bool)
    if encoder.vocabulary.unk is not None:
        unknown[owner[encoded.ids == encoder.vocabulary.unk]] = True
    tallies = {name: [0, 0, 0, 0] for name in CLASSES}
    for number, character in enumerate(alone):
        if tokens[number]:
            known = not unknown[number]
            tally = tallies[character_class(character)]
            tally[0] += characters[character]
            tally[1] += characters[character] * known
            tally[2] += 1
            tally[3] += known
    return {name: Coverage(*tally) for name, tally in tallies.items() if tally[0]}


def character_class(character: str) -> str:
    """Which of `CLASSES` one character belongs to, by its Unicode name and category."""
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
    for start, found in (("HIRAGANA", "hiragana"), ("KATAKANA", "katakana"), ("HALFWIDTH KATAKANA", "katakana")):
        if name.startswith(start):
            return found
    return "latin" if "LATIN" in name else "other"

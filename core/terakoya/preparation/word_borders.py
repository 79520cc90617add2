"""Which tokens start a word, from the spans of the words and of the tokens in the same text.

A border between two words is found where a token begins at it. White space at a border belongs to the word after it, so
the first token that begins there starts the word, be it `▁` alone. A border inside a token cannot be found: the words
on both sides of it are masked as one.

Letters: T tokens, D documents, B borders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from terakoya.components import EncodedDocuments, FindWords, WordFinder
from terakoya.errors import UserError

FOUND = "word borders at a token's start"
INSIDE = "word borders inside tokens"
"""Names of the counts of borders; the start of a text and of a line is no border."""


@dataclass(frozen=True)
class NamedFinder:
    """A word finder, with the name under which a plugin registers it."""

    name: str
    finder: WordFinder

    @property
    def recorded(self) -> str:
        """Its name and settings, as a store records them."""
        return f"{self.name} {self.finder.model_dump_json()}"

    @property
    def fingerprint(self) -> str:
        """A hash of everything on which its words depend. Raises UserError as `WordFinder.fingerprint`."""
        return hashlib.sha256(orjson.dumps([self.recorded, sorted(self.finder.fingerprint().items())])).hexdigest()


def find_word_finder(setting: str | Mapping[str, Any]) -> NamedFinder:
    """Returns the word finder of a name, or of an object with `type` and its settings. Raises UserError if there is
    none, and for settings that it does not have."""
    from terakoya.plugins.create import create_component

    settings = {"type": setting} if isinstance(setting, str) else dict(setting)
    name = settings.pop("type", None)
    if not isinstance(name, str):
        raise UserError(f'words.type: expected a name such as "mecab", got {name!r}')
    return NamedFinder(name, create_component("word_finders", name, settings, where=f"words {name}"))


def describe_borders(notes: Mapping[str, int]) -> str:
    """Describes the counts FOUND and INSIDE, with their shares."""
    found, inside = notes.get(FOUND, 0), notes.get(INSIDE, 0)
    total = found + inside
    at_start, within = (f"{count:,} ({100 * count / max(1, total):.2f} %)" for count in (found, inside))
    return (
        f"{total:,} borders between words: {at_start} are at the start of a token, {within} are inside a token, which "
        "joins the words on both sides"
    )


EncodeSpans = Callable[[Sequence[str]], EncodedDocuments]
"""`Encoder.encode` with the argument `spans=True`."""


def with_words(encode: EncodeSpans, find: FindWords) -> EncodeSpans:
    """Returns a function that encodes documents as `encode` does, with the starts of the words that `find` finds, and
    with the counts FOUND and INSIDE as notes."""

    def encode_with_words(documents: Sequence[str]) -> EncodedDocuments:
        encoded = encode(documents)
        assert encoded.spans is not None, "the encoder gives no spans"
        starts, counts = mark_word_starts(encoded, find(documents))
        return replace(encoded, spans=None, word_starts=starts, notes={**encoded.notes, **counts})

    return encode_with_words


def mark_word_starts(encoded: EncodedDocuments, words: Sequence[np.ndarray]) -> tuple[np.ndarray, Mapping[str, int]]:
    """Returns (T,) bool, True for the first token of each line and of each word, and the counts FOUND and INSIDE.

    `words` are those of each document, see `FindWords`.
    """
    assert encoded.spans is not None
    line_starts = np.cumsum(encoded.line_lengths, dtype=np.int64) - encoded.line_lengths
    is_start = np.zeros(len(encoded.ids), bool)
    is_start[line_starts] = True
    if not len(encoded.ids):
        return is_start, {}
    # positions of all documents, one after the other, with room between them
    line_ends = np.concatenate([[0], np.cumsum(encoded.line_lengths, dtype=np.int64)])
    token_ends = line_ends[np.concatenate([[0], np.cumsum(encoded.document_lines, dtype=np.int64)])]
    sizes = _maximum(encoded.spans[:, 1], token_ends)
    sizes = np.maximum(sizes, [each[-1, 1] if len(each) else 0 for each in words])
    bases = np.cumsum(sizes + 1) - sizes
    base = np.repeat(bases, np.diff(token_ends))
    starts = np.maximum.accumulate(encoded.spans[:, 0] + base)
    stops = np.maximum.accumulate(encoded.spans[:, 1] + base)
    border_starts, border_stops, documents = _borders(words, bases)
    before = np.cumsum(np.bincount(starts + 1, minlength=bases[-1] + sizes[-1] + 2))  # tokens that begin before a place
    first = before[border_starts]  # the first token that begins at the border or after it
    is_last = first >= token_ends[documents + 1]
    covered = np.where(first > 0, stops[first - 1], 0)  # how far the tokens before it reach
    found = ~is_last & (covered <= border_stops)
    has_tokens = np.diff(token_ends)[documents] > 0
    inside = has_tokens & (covered > border_stops)  # a last word without tokens has no border
    is_start[first[found]] = True
    return is_start, {FOUND: int(found.sum()), INSIDE: int(inside.sum())}


def _maximum(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the largest of `values` between each two of `ends`, 0 where there is none."""
    result = np.zeros(len(ends) - 1, np.int64)
    filled = np.flatnonzero(np.diff(ends))
    result[filled] = np.maximum.reduceat(values, ends[filled])
    return result


def _borders(words: Sequence[np.ndarray], bases: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each two neighbouring words of a document where the first ends, where the second begins, and the
    number of the document, three arrays (B,)."""
    counts = np.array([len(each) for each in words], np.int64)
    documents = np.repeat(np.arange(len(words)), counts)
    flat = np.concatenate([np.empty((0, 2), np.int64), *words]) + bases[documents][:, None]
    same = documents[1:] == documents[:-1]
    return flat[:-1, 1][same], flat[1:, 0][same], documents[1:][same]

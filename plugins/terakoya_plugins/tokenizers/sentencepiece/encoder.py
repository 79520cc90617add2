"""Encodes documents with SentencePiece's own ids, many lines per call of the library."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from terakoya.components import EncodedDocuments
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder
from terakoya.toolkit.tokenizers.line_encoder import encode_lines, join_rows
from terakoya.toolkit.tokenizers.sentencepiece_folder import SentencePieceFolder
from terakoya_plugins.tokenizers.sentencepiece.native import find_native_model
from terakoya_plugins.tokenizers.sentencepiece.spans import piece_spans
from terakoya_plugins.tokenizers.sentencepiece.tokenizer_json import Divergence
from terakoya_plugins.tokenizers.sentencepiece.words import WordBounds, word_start_flags

MUCH_TEXT = 1 << 20
"""From so many characters on, it is worth the half second until functions in C have read the vocabulary."""


class SentencePieceEncoder:
    """Implements `Encoder`. Word starts are known if MeCab splits words; a literal special token is one word."""

    vocabulary: Vocabulary
    gives_spans = True

    def __init__(
        self, folder: SentencePieceFolder, words: WordBounds | None, *, parse: bool, load: Callable[[], Any]
    ) -> None:
        """`parse`: whether special tokens in text get their ids. `load`: returns Transformers' tokenizer."""
        self.vocabulary = folder.vocabulary
        self._folder, self._words, self._parse = folder, words, parse
        self._load = functools.cache(load)
        self._processor = folder.processor
        self._seen = 0
        self._special = _any_of(folder.special)
        self._literal = re.compile(f"({self._special.pattern})")
        self._differs: Divergence | None = None
        if parse and folder.has_json:
            self._differs = Divergence(folder.processor, lambda: self._load().backend_tokenizer)
        names = [*filter(None, map(folder.processor.id_to_piece, folder.silent))]
        self._silent = _any_of(names) if names and parse and not folder.has_json else None

    def encode(self, documents: Sequence[str], *, whole: bool = False, spans: bool = False) -> EncodedDocuments:
        """Implements `Encoder.encode` and `Tokenizer.keeps_line_ends`. MeCab, if it is used, reads single lines."""
        whole = whole and self._words is None

        def rows_of(lines: list[str], literals: bool) -> tuple[list[np.ndarray], np.ndarray]:
            return self._rows(lines, literals and self._parse, spans)

        dtype = self.vocabulary.dtype()
        encoded = encode_lines(documents, rows_of, dtype=dtype, literal=self._special, whole=whole, spans=spans)
        return encoded if self._words is not None or spans else replace(encoded, word_starts=None)

    def _rows(self, lines: list[str], search: bool, spans: bool) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the ids of each line, and the spans or the word starts of all lines; `search`: whether to find
        literals."""
        split: dict[int, list[str]] = {}  # line -> text, literal, text, ..., literal, text
        plain = lines
        if search:
            split = {index: self._literal.split(line) for index, line in enumerate(lines) if self._special.search(line)}
            plain = [*("" if index in split else line for index, line in enumerate(lines))]
            plain += itertools.chain.from_iterable(parts[::2] for parts in split.values())
        rows, odd = self._checked_ids(plain, divide=not spans and self._words is None)
        whole = set() if self._folder.plain else set(split)  # special tokens overlap, or strip white space around them
        if odd:
            owners = [*range(len(lines)), *(index for index, parts in split.items() for _ in parts[::2])]
            whole.update(owners[number] for number in odd)
            plain = ["" if number in odd else text for number, text in enumerate(plain)]
            rows = [row[:0] if number in odd else row for number, row in enumerate(rows)]
        if spans:
            flat = self._spans(plain, rows)
        else:
            flat = self._starts(plain, rows) if self._words is not None else np.empty(0, bool)
        if not split and not whole:
            return rows, flat
        facts = np.split(flat, np.cumsum([*map(len, rows[:-1])])) if spans or self._words is not None else []
        position = len(lines)
        for index, parts in split.items():
            texts = slice(position, position + len(parts[::2]))
            position = texts.stop
            if index not in whole:
                literals = [np.array([self._folder.special[part]], np.int32) for part in parts[1::2]]
                rows[index] = np.concatenate([*_interleave(rows[texts], literals)])
                if spans:
                    facts[index] = _literal_spans(parts, facts[texts])
                elif facts:
                    one = np.ones(1, bool)
                    facts[index] = np.concatenate([*_interleave(facts[texts], [one] * len(literals))])
        for index in whole:
            rows[index] = np.array(self._load()(lines[index], add_special_tokens=False)["input_ids"], np.int32)
            if spans:  # the text of each piece is not known, so the line counts as one word
                facts[index] = np.full((len(rows[index]), 2), [0, len(lines[index])], np.int64)
            elif facts:
                facts[index] = np.arange(len(rows[index])) == 0
        del rows[len(lines) :]
        return rows, np.concatenate(facts[: len(lines)]) if facts else flat

    def _checked_ids(self, texts: list[str], *, divide: bool) -> tuple[list[np.ndarray], set[int]]:
        """Returns the ids of each text, and the numbers of the texts that may have others by Transformers. `divide`:
        whether long texts may be encoded in parts."""
        if self._differs is None:
            return self._ids(texts), set()
        parts = [self._differs.divide(text) for text in texts] if divide else [[text] for text in texts]
        flat = [*itertools.chain.from_iterable(parts)]
        rows = self._ids(flat)
        odd = self._differs.find(flat, rows)
        if len(flat) == len(texts):
            return rows, set(odd)
        ends = [*itertools.accumulate(map(len, parts), initial=0)]
        owners = np.searchsorted(ends[1:], odd, "right")
        return [np.concatenate(rows[start:stop]) for start, stop in itertools.pairwise(ends)], {*owners.tolist()}

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text. If special tokens are parsed, looks ids up by the pieces' names as Transformers
        does: a run of unknown characters may spell the name of a special token."""
        self._seen += sum(map(len, texts))
        is_much = self._seen >= MUCH_TEXT
        if is_much and self._fast is not None and (known := self._fast.encode(texts)) is not None:
            rows = known
        else:  # a fifth of the time less than with Python's ints
            rows = self._processor.EncodeAsNumpy(texts, num_threads=1)
        if self._silent is None:
            return rows
        for number, text in enumerate(texts):
            if self._silent.search(text):
                pieces = self._processor.encode(text, out_type=str)
                rows[number] = np.array([self._processor.piece_to_id(piece) for piece in pieces], np.int32)
        return rows

    @functools.cached_property
    def _fast(self) -> FastEncoder | None:
        return find_native_model(self._processor)

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        """Number of characters of each piece: -1 for unknown, 0 for the second to last byte of a character."""
        processor = self._processor
        size = processor.get_piece_size()
        lengths = np.fromiter((len(processor.id_to_piece(id)) for id in range(size)), np.int64, size)
        for id in np.flatnonzero(np.fromiter(map(processor.is_byte, range(size)), bool, size)):
            lengths[id] = 0 if 0x80 <= int(processor.id_to_piece(int(id))[1:-1], 16) < 0xC0 else 1
        lengths[[id for id in self._folder.silent if processor.is_unknown(id)]] = -1
        return lengths

    def _starts(self, texts: list[str], rows: list[np.ndarray]) -> np.ndarray:
        assert self._words is not None
        counts, lengths = self._piece_lengths(texts, rows)
        normalized = self._processor.normalize(texts)
        bounds = self._words.starts([text.replace("\u2581", " ") for text in normalized])
        return word_start_flags(bounds, [*map(len, normalized)], counts, lengths)

    def _spans(self, texts: list[str], rows: list[np.ndarray]) -> np.ndarray:
        counts, lengths = self._piece_lengths(texts, rows)
        return piece_spans(self._processor, texts, counts, lengths)

    def _piece_lengths(self, texts: list[str], rows: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
        """Returns the number of pieces of each text, and the number of normalised characters of each piece (T,)."""
        counts = [*map(len, rows)]
        lengths = self._lengths[join_rows(rows, np.int64)]
        unknown = np.flatnonzero(lengths < 0)  # their number of characters depends on the text
        if len(unknown):
            ends = np.cumsum(counts)
            for number in np.unique(np.searchsorted(ends, unknown, side="right")):
                pieces = self._processor.encode(texts[number], out_type=str)
                row = lengths[ends[number] - counts[number] : ends[number]]
                row[row < 0] = [len(piece) for piece, length in zip(pieces, row, strict=True) if length < 0]
        return counts, lengths


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _literal_spans(parts: Sequence[str], spans: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the spans (n, 2) of the tokens of a line, which is `parts`: a text, a literal, a text, ..., a text.
    `spans` are those of each text in it."""
    ends = [*itertools.accumulate(map(len, parts))]
    literals = [np.array([[end - len(part), end]]) for end, part in zip(ends[1::2], parts[1::2], strict=True)]
    moved = [each + end - len(part) for each, end, part in zip(spans, ends[::2], parts[::2], strict=True)]
    return np.concatenate([*_interleave(moved, literals)])


def _interleave(texts: Sequence[Any], literals: Sequence[Any]) -> Iterator[Any]:
    """Yields the first text, the first literal, the second text, ..., the last text."""
    yield texts[0]
    for literal, text in zip(literals, texts[1:], strict=True):
        yield literal
        yield text

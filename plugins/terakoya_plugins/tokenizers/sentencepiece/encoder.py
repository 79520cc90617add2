"""Documents to SentencePiece's own ids, many lines in one call of the library."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from terakoya.components import Encoded
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.tokenizers.line_encoder import encode_lines, joined
from terakoya.toolkit.tokenizers.sentencepiece_folder import SentencePieceFolder
from terakoya_plugins.tokenizers.sentencepiece.words import WordBounds, flags


class SentencePieceEncoder:
    """Documents to ids; see `Encoder`. Word starts are known where MeCab cuts words; a literal special token is one."""

    vocabulary: Vocabulary

    def __init__(
        self, folder: SentencePieceFolder, words: WordBounds | None, *, parse: bool, load: Callable[[], Any]
    ) -> None:
        """`parse` says whether special tokens in text get their ids; `load` returns Transformers' tokenizer."""
        self.vocabulary = folder.vocabulary
        self._folder, self._words, self._parse = folder, words, parse
        self._load = functools.cache(load)
        self._processor = folder.processor
        self._special = _any_of(folder.special)
        self._literal = re.compile(f"({self._special.pattern})")
        self._odd = _any_of(filter(None, map(folder.processor.id_to_piece, folder.silent)) if parse else ())

    def encode(self, documents: Sequence[str], *, whole: bool = False) -> Encoded:
        """See `Encoder.encode` and `Tokenizer.keeps_line_ends`; MeCab, where it says what words are, reads lines."""
        whole = whole and self._words is None

        def rows_of(lines: list[str], literals: bool) -> tuple[list[np.ndarray], np.ndarray]:
            return self._rows(lines, literals and self._parse)

        encoded = encode_lines(documents, rows_of, dtype=self.vocabulary.dtype(), literal=self._special, whole=whole)
        return encoded if self._words is not None else replace(encoded, word_starts=None)

    def _rows(self, lines: list[str], search: bool) -> tuple[list[np.ndarray], np.ndarray]:
        """The ids of each line, and word starts over all of them; `search` says whether lines may hold literals."""
        cut: dict[int, list[str]] = {}  # line -> text, literal, text, ..., literal, text
        plain = lines
        if search:
            cut = {number: self._literal.split(line) for number, line in enumerate(lines) if self._special.search(line)}
            plain = [*("" if number in cut else line for number, line in enumerate(lines))]
            plain += itertools.chain.from_iterable(parts[::2] for parts in cut.values())
        rows = self._ids(plain)
        flat = self._starts(plain, rows) if self._words is not None else np.empty(0, bool)
        if not cut:
            return rows, flat
        starts = np.split(flat, np.cumsum([*map(len, rows[:-1])])) if self._words is not None else []
        place = len(lines)
        for number, parts in cut.items():
            texts = slice(place, place + len(parts[::2]))
            place = texts.stop
            if self._folder.plain:
                marks = [np.array([self._folder.special[part]], np.int32) for part in parts[1::2]]
                rows[number] = np.concatenate([*_interleaved(rows[texts], marks)])
                if starts:
                    one = np.ones(1, bool)
                    starts[number] = np.concatenate([*_interleaved(starts[texts], [one] * len(marks))])
            else:  # tokens that overlap or strip their neighbours
                found = self._load()(lines[number], add_special_tokens=False)["input_ids"]
                rows[number] = np.array(found, np.int32)
                if starts:  # which text a piece came from is not known: the line stays in one
                    starts[number] = np.arange(len(rows[number])) == 0
        del rows[len(lines) :]
        return rows, np.concatenate(starts[: len(lines)]) if starts else flat

    def _ids(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text. Where special tokens are parsed, as Transformers finds them: by the pieces' names,
        which a run of unknown characters may spell."""
        if hasattr(self._processor, "EncodeAsNumpy"):  # from 0.2.2 on; a fifth of the time is making and reading ints
            rows: list[np.ndarray] = self._processor.EncodeAsNumpy(texts, num_threads=1)
        else:
            rows = [np.array(row, np.int32) for row in self._processor.encode(texts, out_type=int, num_threads=1)]
        for number, text in enumerate(texts):
            if self._odd.search(text):
                pieces = self._processor.encode(text, out_type=str)
                rows[number] = np.array([self._processor.piece_to_id(piece) for piece in pieces], np.int32)
        return rows

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        """How many characters each piece stands for: -1 unknown, 0 the second to last bytes of a character."""
        processor = self._processor
        size = processor.get_piece_size()
        lengths = np.fromiter((len(processor.id_to_piece(id)) for id in range(size)), np.int64, size)
        for id in np.flatnonzero(np.fromiter(map(processor.is_byte, range(size)), bool, size)):
            lengths[id] = 0 if 0x80 <= int(processor.id_to_piece(int(id))[1:-1], 16) < 0xC0 else 1
        lengths[[id for id in self._folder.silent if processor.is_unknown(id)]] = -1
        return lengths

    def _starts(self, texts: list[str], rows: list[np.ndarray]) -> np.ndarray:
        """Word starts of all texts, one after the other."""
        assert self._words is not None
        counts = [*map(len, rows)]
        lengths = self._lengths[joined(rows, np.int64)]
        unknown = np.flatnonzero(lengths < 0)  # only their text tells how many characters they stand for
        if len(unknown):
            ends = np.cumsum(counts)
            for number in np.unique(np.searchsorted(ends, unknown, side="right")):
                pieces = self._processor.encode(texts[number], out_type=str)
                row = lengths[ends[number] - counts[number] : ends[number]]
                row[row < 0] = [len(piece) for piece, length in zip(pieces, row, strict=True) if length < 0]
        normalized = self._processor.normalize(texts)
        bounds = self._words.starts([text.replace("\u2581", " ") for text in normalized])
        return flags(bounds, [*map(len, normalized)], counts, lengths)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _interleaved(texts: Sequence[Any], marks: Sequence[Any]) -> Iterator[Any]:
    """The first text, the first mark, the second text, ..., the last text."""
    yield texts[0]
    for mark, text in zip(marks, texts[1:], strict=True):
        yield mark
        yield text

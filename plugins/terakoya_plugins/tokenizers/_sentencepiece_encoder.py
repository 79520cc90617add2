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
from terakoya.data.line_encoder import encode_lines
from terakoya.data.sentencepiece_folder import SentencePieceFolder
from terakoya.data.vocab import Vocabulary
from terakoya_plugins.tokenizers._sentencepiece_words import WordBounds, flags


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
        self._lengths, odd = _piece_table(folder)
        self._odd = _any_of(odd if parse else ())

    def encode(self, documents: Sequence[str], *, whole: bool = False) -> Encoded:
        """See `Encoder.encode` and `Tokenizer.keeps_line_ends`; MeCab, where it says what words are, reads lines."""
        whole = whole and self._words is None

        def rows_of(lines: list[str], literals: bool) -> tuple[list[list[int]], np.ndarray]:
            return self._rows(lines, literals and self._parse)

        encoded = encode_lines(documents, rows_of, dtype=self.vocabulary.dtype(), literal=self._special, whole=whole)
        return encoded if self._words is not None else replace(encoded, word_starts=None)

    def _rows(self, lines: list[str], search: bool) -> tuple[list[list[int]], np.ndarray]:
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
                marks = [[self._folder.special[part]] for part in parts[1::2]]
                rows[number] = [*itertools.chain.from_iterable(_interleaved(rows[texts], marks))]
                if starts:
                    one = np.ones(1, bool)
                    starts[number] = np.concatenate([*_interleaved(starts[texts], [one] * len(marks))])
            else:  # tokens that overlap or strip their neighbours
                rows[number] = self._load()(lines[number], add_special_tokens=False)["input_ids"]
                if starts:  # which text a piece came from is not known: the line stays in one
                    starts[number] = np.arange(len(rows[number])) == 0
        del rows[len(lines) :]
        return rows, np.concatenate(starts[: len(lines)]) if starts else flat

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. Where special tokens are parsed, as Transformers finds them: by the pieces' names,
        which a run of unknown characters may spell."""
        rows: list[list[int]] = self._processor.encode(texts, out_type=int, num_threads=1)
        for number, text in enumerate(texts):
            if self._odd.search(text):
                rows[number] = [
                    self._processor.piece_to_id(piece) for piece in self._processor.encode(text, out_type=str)
                ]
        return rows

    def _starts(self, texts: list[str], rows: list[list[int]]) -> np.ndarray:
        """Word starts of all texts, one after the other."""
        assert self._words is not None
        counts = [*map(len, rows)]
        lengths = self._lengths[np.fromiter(itertools.chain.from_iterable(rows), np.int64, sum(counts))]
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


def _piece_table(folder: SentencePieceFolder) -> tuple[np.ndarray, list[str]]:
    """How many characters each piece stands for: -1 unknown, 0 the second to last bytes of a character; and the pieces
    that a run of unknown characters may spell."""
    processor = folder.processor
    size = processor.get_piece_size()
    lengths = np.zeros(size, np.int64)
    odd = []
    for id in range(size):
        piece = processor.id_to_piece(id)
        lengths[id] = len(piece)
        if processor.is_byte(id):
            lengths[id] = 0 if 0x80 <= int(piece[1:-1], 16) < 0xC0 else 1
        elif processor.is_unknown(id):
            lengths[id] = -1
        if (processor.is_control(id) or processor.is_unused(id) or processor.is_unknown(id)) and piece:
            odd.append(piece)
    return lengths, odd


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _interleaved(texts: Sequence[Any], marks: Sequence[Any]) -> Iterator[Any]:
    """The first text, the first mark, the second text, ..., the last text."""
    yield texts[0]
    for mark, text in zip(marks, texts[1:], strict=True):
        yield mark
        yield text

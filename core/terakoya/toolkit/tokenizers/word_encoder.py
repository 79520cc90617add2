"""The fast encoder of tokenizers that split words first and then look up pieces. The pieces of each word are cached."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terakoya.components import EncodedDocuments
from terakoya.components.vocabulary import Vocabulary
from terakoya.corpus.unread_text import find_unread
from terakoya.toolkit.tokenizers.bert_folder import BertFolder
from terakoya.toolkit.tokenizers.line_encoder import in_batches
from terakoya.toolkit.tokenizers.word_splitters import WordSplitter
from terakoya.toolkit.tokenizers.wordpiece import PREFIX
from terakoya_tokenizer.characters import lower_cased
from terakoya_tokenizer.word_cache import LINE_END, MARK, WordCache
from terakoya_tokenizer.wordpiece import Pieces


class WordEncoder:
    """An `Encoder`. Words start where `words` splits them; a literal special token is a word."""

    vocabulary: Vocabulary

    def __init__(
        self,
        folder: BertFolder,
        words: WordSplitter,
        pieces: Callable[[str], Pieces],
        *,
        parse: bool,
        lower: bool,
        load: Callable[[], Any],
    ) -> None:
        """`pieces` splits a word. With `parse`, special tokens in text get their ids; with `lower`, words
        are lower-cased. `load` returns Transformers' tokenizer."""
        self.vocabulary = folder.vocabulary
        self._folder, self._words, self._parse = folder, words, parse
        self._load = functools.cache(load)
        special = sorted(folder.special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._literal = re.compile(f"({self._special.pattern})")
        never_split = {*(folder.config.get("never_split") or ()), *special}
        self._pieces = lower_cased(pieces, never_split) if lower else pieces
        self._cache = WordCache(self._word_pieces, self.vocabulary.dtype())

    def encode(self, documents: Sequence[str]) -> EncodedDocuments:
        literals: Counter[str] = Counter()
        unread: dict[int, list[str]] = {}
        lines: list[str] = []
        words: dict[int, str] = {}  # of lines with special tokens, by their numbers
        ends = np.zeros(len(documents) + 1, np.int64)
        for number, text in enumerate(documents, 1):
            plain = text
            if self._special.search(text) and (found := self._special.findall(text)):
                literals.update(found)
                if self._parse:
                    words.update(enumerate(map(self._with_literals, text.split("\n")), len(lines)))
                    plain = "\n" * text.count("\n")
            lines += self._words.lines(plain)
            if "\0" in text and self._words.stops_at_nul:
                unread[number - 1] = find_unread(text, self._special if self._parse else None)
            ends[number] = len(lines)
        lines = self._words.split(lines)
        for place, each in words.items():
            lines[place] = each
        dtype = self.vocabulary.dtype()
        ids, word_starts, lengths = [np.empty(0, dtype)], [np.empty(0, bool)], [np.empty(0, np.int64)]
        for batch in in_batches(lines):  # each line with a space behind it
            chunk_ids, chunk_starts, chunk_lengths = self._cache.encode(f" {LINE_END} ".join([*batch, ""]))
            ids.append(chunk_ids)
            word_starts.append(chunk_starts)
            lengths.append(chunk_lengths)
        every_length = np.concatenate(lengths)
        before = np.concatenate([[0], np.cumsum(every_length > 0)])[ends]
        return EncodedDocuments(
            ids=np.concatenate(ids),
            line_lengths=every_length[every_length > 0].astype(np.int32),
            document_lines=np.diff(before).astype(np.int32),
            word_starts=np.concatenate(word_starts),
            literals=dict(literals),
            unread=unread,
        )

    def _with_literals(self, line: str) -> str:
        """Returns the words of one line. A special token is a mark, which no word begins with, and its id."""
        if not self._folder.plain:
            return self._slow(line)
        words = []
        for index, segment in enumerate(self._literal.split(line)):
            if index % 2:
                words.append(f"{MARK}{self._folder.special[segment]}")
            elif segment:
                words += self._words.split(self._words.lines(segment))
        return " ".join(words)

    def _slow(self, line: str) -> str:
        """Returns `_with_literals` from Transformers itself, for special tokens that overlap or strip their
        neighbours."""
        tokenizer = self._load()
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        words: list[str] = []
        for id, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
            if words and piece.startswith(PREFIX):
                words[-1] += f",{id}"
            else:
                words.append(f"{MARK}{id}")
        return " ".join(words)

    def _word_pieces(self, word: str) -> Pieces:
        if word.startswith(MARK):  # ids of special tokens, whose place in the text is not asked for
            ids = [int(id) for id in word[len(MARK) :].split(",")]
            return ids, [0] * len(ids), [0] * len(ids)
        return self._pieces(word)

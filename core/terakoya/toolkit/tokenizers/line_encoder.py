"""Converting documents to ids with a tokenizer of Transformers, many lines at a time."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from terakoya.components import EncodedDocuments
from terakoya.components.tokenizer import encode_texts
from terakoya.components.vocabulary import Vocabulary, reserved_ids, sentinel_ids, vocabulary_size
from terakoya.corpus.unread_text import find_unread
from terakoya.toolkit.tokenizers._token_spans import ByteSpans, library_spans
from terakoya.toolkit.tokenizers.fast_encoder import FastEncoder
from terakoya.toolkit.tokenizers.find_encoder import find_fast_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = list[int] | np.ndarray
"""The ids of a line. All rows of a batch have the same type."""
Rows = tuple[Sequence[Row], np.ndarray]
"""The ids of each line, and a fact of each of their tokens: (T,) word starts, or (T, 2) spans in the line."""

BATCH_CHARACTERS = 1 << 19
BATCH_LINES = 8192
MANY_CHARACTERS = 1 << 16
"""From so many characters in a batch on, it is worth the second that a faster library takes to read the vocabulary."""
_NAMES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")


class LineEncoder:
    """An `Encoder` for any tokenizer that Transformers loads. Word starts are known only for a fast WordPiece
    tokenizer: its words are the pre-tokens that its own rules produce. Pre-tokens of other models are runs of letters
    or whole lines, not words: their word starts are None."""

    vocabulary: Vocabulary

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, parse: bool) -> None:
        """With `parse`, special tokens in text get their ids. The encoder changes `tokenizer`: do not use it
        elsewhere."""
        self.vocabulary = vocabulary_of(tokenizer)
        self._tokenizer = tokenizer
        self._tokenizer.model_max_length = 1 << 60  # nothing is truncated, so no line is too long
        self._split = bool(getattr(tokenizer, "split_special_tokens", False)) or not parse
        self._backend = _backend(tokenizer)
        literal = sorted({str(token) for token in special_tokens(tokenizer)}, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literal)) or "(?!)")
        self._stops_at_nul = (
            getattr(tokenizer, "word_tokenizer_type", None) == "mecab"  # of BertJapaneseTokenizer
            and tokenizer.do_word_tokenize
        )
        self._knows_words = has_words(tokenizer)
        self.gives_spans = bool(tokenizer.is_fast)
        is_bytes = self._backend is not None and ByteSpans.is_for(self._backend)
        self._bytes = ByteSpans(self._backend) if is_bytes else None

    def encode(self, documents: Sequence[str], *, whole: bool = False, spans: bool = False) -> EncodedDocuments:
        """See `Encoder.encode` and `Tokenizer.keeps_line_ends`."""

        def rows_of(lines: list[str], _: bool) -> Rows:
            if spans:
                return encode_texts(self._call_for_spans, lines)
            rows, words = self._rows(lines)
            return rows, np.concatenate([np.empty(0, bool), *map(_word_starts, words)])

        dtype = self.vocabulary.dtype()
        encoded = encode_lines(documents, rows_of, dtype=dtype, literal=self._literal, whole=whole, spans=spans)
        if self._stops_at_nul:
            special = None if self._split else self._literal
            every = (find_unread(text, special, whole=whole) for text in documents)
            encoded = replace(encoded, unread={number: parts for number, parts in enumerate(every) if parts})
        return encoded if self._knows_words or spans else replace(encoded, word_starts=None)

    def _rows(self, lines: list[str]) -> tuple[Sequence[Row], list[list[int | None]]]:
        """Returns the ids of each line, and the word number of each token where words are known. Raises UserError with
        the first line that the tokenizer's library cannot encode."""
        return encode_texts(self._call, lines)

    def _call_for_spans(self, lines: list[str]) -> Rows:
        """Returns the ids of each line, and the spans (T, 2) of all tokens in their lines."""
        if self._backend is None:
            encoded = self._encode(lines, return_offsets_mapping=True)
            offsets = [each for row in encoded["offset_mapping"] for each in row]
            return encoded["input_ids"], np.array(offsets, np.int64).reshape(-1, 2)
        self._backend.encode_special_tokens = self._split
        if self._bytes is None:
            return library_spans(self._backend.encode_batch(lines, add_special_tokens=False))
        rows = [each.ids for each in self._backend.encode_batch_fast(lines, add_special_tokens=False)]
        return rows, self._bytes.find(lines, rows, self._offsets)

    def _offsets(self, line: str) -> np.ndarray:
        return library_spans(self._backend.encode_batch([line], add_special_tokens=False))[1]

    @functools.cached_property
    def _fast(self) -> FastEncoder | None:
        return None if self._backend is None else find_fast_encoder(self._backend, split=self._split)

    def _call(self, lines: list[str]) -> tuple[Sequence[Row], list[list[int | None]]]:
        is_long = sum(map(len, lines)) >= MANY_CHARACTERS
        if is_long and self._fast is not None and (rows := self._fast.encode(lines)) is not None:
            return rows, []
        if self._backend is not None:
            self._backend.encode_special_tokens = self._split
            if not self._knows_words:  # the fast method returns neither offsets nor words
                return [each.ids for each in self._backend.encode_batch_fast(lines, add_special_tokens=False)], []
            encodings = self._backend.encode_batch(lines, add_special_tokens=False)
            return [each.ids for each in encodings], [each.word_ids for each in encodings]
        encoded = self._encode(lines)
        rows = encoded["input_ids"]
        return rows, [encoded.word_ids(index) for index in range(len(rows))] if self._knows_words else []

    def _encode(self, lines: list[str], **options: bool) -> Any:
        """Returns what Transformers' class makes of `lines`, with ids alone but for the `options`."""
        return self._tokenizer(
            lines, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
            split_special_tokens=self._split, **options,
        )  # fmt: skip


def encode_lines(
    documents: Sequence[str],
    rows_of: Callable[[list[str], bool], Rows],
    *,
    dtype: np.dtype,
    literal: re.Pattern[str],
    whole: bool,
    spans: bool = False,
) -> EncodedDocuments:
    """Encodes the lines of `documents`, or with `whole` each document as one line, in batches with `rows_of`.

    `rows_of(lines, literals)` returns the ids of each line and the word starts (T,) bool over all of them, or (0,)
    where words are not known; with `spans`, spans (T, 2) instead, and the result has spans and no word starts. Its
    argument `literals` is True if `literal` was found in any document.
    """
    literals: Counter[str] = Counter()
    lines: list[str] = []
    ends = np.zeros(len(documents) + 1, np.int64)
    for number, text in enumerate(documents, 1):
        literals.update(literal.findall(text))
        lines += [text] if whole else text.split("\n")
        ends[number] = len(lines)
    ids, lengths = [np.empty(0, dtype)], [np.empty(0, np.int64)]
    facts = [np.empty((0, 2), np.int64) if spans else np.empty(0, bool)]
    for batch in in_batches(lines):
        rows, batch_facts = rows_of(batch, bool(literals))
        lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
        ids.append(join_rows(rows, dtype))
        facts.append(batch_facts)
    every = np.concatenate(lengths)
    before = np.concatenate([[0], np.cumsum(every > 0)])[ends]
    of_tokens = np.concatenate(facts)
    return EncodedDocuments(
        ids=np.concatenate(ids),
        line_lengths=every[every > 0].astype(np.int32),
        document_lines=np.diff(before).astype(np.int32),
        word_starts=None if spans else of_tokens,
        literals=dict(literals),
        spans=of_tokens + np.repeat(_line_positions(lines, ends), every)[:, None] if spans else None,
    )


def _line_positions(lines: Sequence[str], ends: np.ndarray) -> np.ndarray:
    """Returns the position of each line in its document, of which `ends` count the lines (D + 1,)."""
    after = np.cumsum(np.fromiter((len(line) + 1 for line in lines), np.int64, len(lines)))
    begins = np.concatenate([[0], after])
    return begins[:-1] - np.repeat(begins[ends[:-1]], np.diff(ends))


def join_rows(rows: Sequence[Row], dtype: np.dtype | type) -> np.ndarray:
    """Returns the ids of all `rows`, one after the other, (T,)."""
    if rows and isinstance(rows[0], np.ndarray):
        return np.concatenate(rows, dtype=dtype, casting="unsafe")
    return np.fromiter(itertools.chain.from_iterable(rows), dtype, sum(map(len, rows)))


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the `tokenizers` library's tokenizer inside a fast tokenizer, without truncation and padding; None where
    Transformers' class adds steps of its own."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus")):
        return None  # the class has steps of its own around the library's
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer.backend_tokenizer


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Returns the facts that training needs; sentinels and unused tokens are special, too."""
    pieces = tokenizer.get_vocab()
    named = {name: pieces[token] for name in _NAMES if (token := getattr(tokenizer, f"{name}_token", None)) in pieces}
    special = {pieces[token] for token in special_tokens(tokenizer)}
    return Vocabulary(
        size=max(len(tokenizer), vocabulary_size(pieces.values())),
        **named,
        special=tuple(sorted(special.union(named.values(), *reserved_ids(pieces)))),
        sentinels=sentinel_ids(pieces),
    )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the tokens that never stand for text, as the tokenizer declares them."""
    pieces = tokenizer.get_vocab()
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [token for token in dict.fromkeys([*tokenizer.all_special_tokens, *added]) if token in pieces]


def has_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer's pre-tokens are certainly words: a fast WordPiece model with a prefix such as
    `##`, after a pre-tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "WordPiece":
        return False
    return bool(backend.model.continuing_subword_prefix) and backend.pre_tokenizer is not None


def _word_starts(words: Sequence[int | None]) -> np.ndarray:
    """Returns True where a token's word differs from the previous one; a token outside words (None) is its own word."""
    numbers = np.array([-1 if word is None else word for word in words], np.int64)
    starts = np.ones(len(numbers), bool)
    starts[1:] = (numbers[1:] != numbers[:-1]) | (numbers[1:] == -1)
    return starts


def in_batches(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yields `lines` in order, about `BATCH_CHARACTERS` at a time."""
    start = size = 0
    for stop, line in enumerate(lines, 1):
        size += len(line)
        if size >= BATCH_CHARACTERS or stop - start >= BATCH_LINES or stop == len(lines):
            yield list(lines[start:stop])
            start, size = stop, 0

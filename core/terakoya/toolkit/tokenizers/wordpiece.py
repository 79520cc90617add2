"""WordPiece: cutting words into pieces, and learning the pieces from a table of word counts.

Cutting is BERT's greedy longest match (https://arxiv.org/abs/1609.08144, section 4.1). Learning is what the field means
by it: `tokenizers`' `BertWordPieceTokenizer`, byte-pair merges over words whose pieces after the first begin with `##`.
That library takes running text only and breaks ties by the order of a hash table; here counts go in, however large,
and equal counts are taken in the order of the pieces' ids, so that the same counts give the same vocabulary.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.bpe_merges import codes_of, merge_pairs

PREFIX = "##"
MAX_CHARACTERS = 100
"""Longer words become the unknown token (Transformers' `WordpieceTokenizer`)."""


class WordPiece:
    """Cuts words into the ids of their pieces."""

    def __init__(self, vocabulary: Mapping[str, int], unknown: int) -> None:
        """`unknown` is the id of a word that cannot be cut into pieces of `vocabulary`."""
        self._unknown = unknown
        self._first = dict(vocabulary)
        self._next = {piece[len(PREFIX) :]: id for piece, id in vocabulary.items() if piece.startswith(PREFIX)}
        self._longest = max(map(len, vocabulary), default=0)

    def ids(self, word: str) -> list[int]:
        """The ids of one word's pieces; several words, if it holds white space; none, if it holds nothing else."""
        ids: list[int] = []
        for part in word.split():
            ids += self._part(part)
        return ids

    def _part(self, word: str) -> list[int]:
        length = len(word)
        if length > MAX_CHARACTERS:
            return [self._unknown]
        ids: list[int] = []
        start, pieces = 0, self._first
        while start < length:
            for stop in range(min(length, start + self._longest), start, -1):
                id = pieces.get(word[start:stop])
                if id is not None:
                    ids.append(id)
                    start, pieces = stop, self._next
                    break
            else:
                return [self._unknown]
        return ids


def bert_words(counts: Mapping[str, int]) -> Counter[str]:
    """Word counts as `BertWordPieceTokenizer` sees them in training: control characters are dropped, punctuation stands
    alone; accents (dakuten) and case stay."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    normalize = BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False
    ).normalize_str
    split = BertPreTokenizer().pre_tokenize_str
    words: Counter[str] = Counter()
    for text, count in counts.items():
        for word, _ in split(normalize(text)):
            words[word] += count
    return words


def train_wordpiece(
    counts: Mapping[str, int],
    *,
    vocab_size: int,
    min_frequency: int,
    limit_alphabet: int,
    special_tokens: Sequence[str],
) -> list[str]:
    """The vocabulary learnt from `counts` (word -> how often), by id: special tokens, single characters, the same
    inside words, then merges in the order they were made.

    At most `limit_alphabet` characters are kept, the most frequent; pieces come from pairs seen at least
    `min_frequency` times. Fewer than `vocab_size` are returned when no such pair is left.

    Raises UserError if special tokens and characters alone do not fit.
    """
    words = list(counts)
    codes, lengths = codes_of(words)
    times = np.fromiter(counts.values(), np.int64, len(words))
    ends = np.cumsum(lengths)
    is_first = np.zeros(len(codes), bool)
    is_first[(ends - lengths)[lengths > 0]] = True
    kept = _alphabet(codes, np.repeat(times, lengths), limit_alphabet)
    pieces = list(dict.fromkeys([*special_tokens, *map(chr, kept)]))
    inside = np.intersect1d(codes[~is_first], kept).tolist()
    pieces += [piece for code in inside if (piece := PREFIX + chr(code)) not in set(special_tokens)]
    if len(pieces) > vocab_size:
        raise UserError(
            f"vocab_size: expected at least {len(pieces):,} for the special tokens and the characters of this corpus, "
            f"got {vocab_size:,}; raise vocab_size or lower limit_alphabet (now {limit_alphabet:,})"
        )
    ids = {piece: id for id, piece in enumerate(pieces)}
    first, other = np.full((2, sys.maxunicode + 1), -1, np.int32)
    first[kept] = [ids[chr(code)] for code in kept]
    other[inside] = [ids[PREFIX + chr(code)] for code in inside]
    symbols = np.where(is_first, first[codes], other[codes])
    left = np.concatenate([[0], np.cumsum(symbols >= 0)])  # characters outside the alphabet are left out
    merge_pairs(
        symbols[symbols >= 0],
        left[ends] - left[ends - lengths],
        times,
        pieces,
        join=lambda one, two: one + two.removeprefix(PREFIX),
        vocab_size=vocab_size,
        min_frequency=min_frequency,
    )
    return pieces


def _alphabet(codes: np.ndarray, times: np.ndarray, limit: int) -> list[int]:
    """The `limit` most frequent of `codes`, each occurring `times` times, ascending; of equals the smaller ones."""
    total = np.zeros(sys.maxunicode + 1, np.int64)
    np.add.at(total, codes, times)
    found = np.flatnonzero(total)
    return sorted(found[np.argsort(-total[found], kind="stable")][:limit].tolist())

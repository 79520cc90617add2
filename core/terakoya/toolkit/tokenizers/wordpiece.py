"""WordPiece: training the pieces on a table of word counts; `terakoya_tokenizer` splits words into them.

Training is that of `tokenizers`' `BertWordPieceTokenizer`: byte-pair merges over words whose pieces after the first
begin with `##`. That library accepts running text only and breaks ties by the order of a hash table. Here the input is
counts of any size, and among equal counts the order of the pieces' ids decides, so that the same counts give the same
vocabulary.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.bpe_merges import codes_of, merge_pairs
from terakoya_tokenizer.wordpiece import PREFIX, WordPiece

__all__ = ["ALPHABET", "PREFIX", "WordPiece", "bert_words", "train_wordpiece"]

ALPHABET = 6129
"""Characters with a piece of their own, at most: as many as Tohoku University's BERTs have."""
ALPHABET_SHARE = 0.75
"""Of the vocabulary: the rest, at least, is for longer pieces."""
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), 0xFFFD} - {*map(ord, "\t\n\r")})


def bert_words(counts: Mapping[str, int], *, lower: bool = False) -> Counter[str]:
    """Returns word counts as `BertWordPieceTokenizer` uses them in training: without control characters, with
    punctuation as separate words; accents (dakuten) are unchanged, and case unless `lower`. Characters of format, such
    as the joiner U+200D in emoji, stay, which that class drops and `BertJapaneseTokenizer` reads."""
    from tokenizers.pre_tokenizers import BertPreTokenizer

    split = BertPreTokenizer().pre_tokenize_str
    words: Counter[str] = Counter()
    for text, count in counts.items():
        for word, _ in split((text.lower() if lower else text).translate(_CONTROLS)):
            words[word] += count
    return words


def train_wordpiece(
    counts: Mapping[str, int],
    *,
    vocab_size: int,
    min_frequency: int,
    limit_alphabet: int | None,
    special_tokens: Sequence[str],
) -> list[str]:
    """Returns the vocabulary trained on `counts` (word -> count), by id: special tokens, single characters, the same
    inside words, then merges in the order of their creation.

    At most `limit_alphabet` characters are kept, the most frequent ones; None is `ALPHABET`, or fewer where these would
    take more than `ALPHABET_SHARE` of the vocabulary. Pieces are pairs that occur at least `min_frequency` times. There
    are fewer than `vocab_size` pieces when no such pair remains.

    Raises UserError if special tokens and characters do not fit.
    """
    words = list(counts)
    codes, lengths = codes_of(words)
    times = np.fromiter(counts.values(), np.int64, len(words))
    ends = np.cumsum(lengths)
    is_first = np.zeros(len(codes), bool)
    is_first[(ends - lengths)[lengths > 0]] = True
    kept, rest = _by_frequency(codes, np.repeat(times, lengths)), np.unique(codes[~is_first])
    if limit_alphabet is None:
        room = int(ALPHABET_SHARE * vocab_size) - len(special_tokens)
        fitting = np.searchsorted(np.cumsum(1 + np.isin(kept, rest)), room, side="right")
        limit_alphabet = min(ALPHABET, int(fitting)) or ALPHABET
    kept = np.sort(kept[:limit_alphabet])
    pieces = list(dict.fromkeys([*special_tokens, *map(chr, kept.tolist())]))
    inside = np.intersect1d(rest, kept).tolist()
    pieces += [piece for code in inside if (piece := PREFIX + chr(code)) not in set(special_tokens)]
    if len(pieces) > vocab_size:
        raise UserError(
            f"vocab_size: expected at least {len(pieces):,} for the special tokens and the characters of this corpus, "
            f"got {vocab_size:,}; raise vocab_size or lower limit_alphabet (now {limit_alphabet:,})"
        )
    ids = {piece: id for id, piece in enumerate(pieces)}
    first, other = np.full((2, sys.maxunicode + 1), -1, np.int32)
    first[kept] = [ids[chr(code)] for code in kept.tolist()]
    other[inside] = [ids[PREFIX + chr(code)] for code in inside]
    symbols = np.where(is_first, first[codes], other[codes])
    ahead = np.concatenate([[0], np.cumsum(symbols >= 0)])  # characters outside the alphabet are left out
    merge_pairs(
        symbols[symbols >= 0],
        ahead[ends] - ahead[ends - lengths],
        times,
        pieces,
        join=lambda one, two: one + two.removeprefix(PREFIX),
        vocab_size=vocab_size,
        min_frequency=min_frequency,
    )
    return pieces


def _by_frequency(codes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the distinct `codes`, which occur `times` times, the most frequent first, of equal ones the smaller."""
    total = np.zeros(sys.maxunicode + 1, np.int64)
    np.add.at(total, codes, times)
    found = np.flatnonzero(total)
    return found[np.argsort(-total[found], kind="stable")]

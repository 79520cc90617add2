"""GPT-2's byte-level BPE, trained from a table of word counts.

(Radford et al., 2019, Language Models are Unsupervised Multitask Learners, section 2.2.) GPT-2's pattern splits a text
into words, whose bytes are written as 256 printable characters: `tokenizers`' `ByteLevel` does both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.bpe_merges import codes_of, merge_pairs


def document_splitter(add_prefix_space: bool) -> Callable[[str], Iterator[str]]:
    """Returns a function from a document, including line ends, to its words, for `word_counts.count_words`."""
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=add_prefix_space, use_regex=True).pre_tokenize_str
    return lambda text: (word for word, _ in split(text))


def train_byte_level_bpe(
    counts: Mapping[str, int], *, vocab_size: int, min_frequency: int, special_tokens: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the vocabulary trained on `counts` (word in `ByteLevel`'s characters -> count), by id: special tokens,
    the 256 bytes, then merges in the order of their creation; and the merges in the order in which to apply them.

    Among equal counts the order of the pieces' ids decides, as in `tokenizers`. There are fewer than `vocab_size`
    pieces when no pair occurs `min_frequency` times. Raises UserError if special tokens and bytes do not fit.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    pieces = list(dict.fromkeys([*special_tokens, *alphabet]))
    if len(pieces) > vocab_size:
        raise UserError(
            f"vocab_size: expected at least {len(pieces):,} for the special tokens and the 256 bytes, got "
            f"{vocab_size:,}; raise vocab_size"
        )
    words = list(counts)
    codes, lengths = codes_of(words)
    ids = np.full(sys.maxunicode + 1, -1, np.int32)
    ids[[ord(character) for character in alphabet]] = [pieces.index(character) for character in alphabet]
    symbols = ids[codes]
    assert (symbols >= 0).all(), "words are not in ByteLevel's characters"
    times = np.fromiter(counts.values(), np.int64, len(words))
    merges = merge_pairs(
        symbols,
        lengths,
        times,
        pieces,
        join=lambda one, two: one + two,
        vocab_size=vocab_size,
        min_frequency=min_frequency,
    )
    return pieces, [(pieces[left], pieces[right]) for left, right in merges]

"""Byte-pair merges: the same pieces and the same order of merges as `tokenizers`' own trainer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer

from terakoya.toolkit.tokenizers import bpe_merges as pair_merging

# No two relevant counts are equal, so they alone determine the order of the first merges.
TWICE = {"##ab": 100, "##a": 10, "x#a": 134, "xab": 70, "yab": 60}


def library(counts: dict[str, int], vocab_size: int) -> tuple[set[str], list[tuple[str, str]]]:
    """Pieces and merges that `tokenizers` learns; pieces inside words begin with ##."""
    tokenizer = Tokenizer(BPE(continuing_subword_prefix="##"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    trainer = BpeTrainer(
        vocab_size=vocab_size, min_frequency=1, show_progress=False, continuing_subword_prefix="##", special_tokens=[]
    )
    tokenizer.train_from_iterator((f"{word} " * count for word, count in counts.items()), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return set(model["vocab"]), [tuple(merge) for merge in model["merges"]]


def ours(counts: dict[str, int], vocab_size: int) -> tuple[set[str], list[tuple[str, str]]]:
    """The same from `merge_pairs`."""
    words = [[word[0], *(f"##{character}" for character in word[1:])] for word in counts]
    symbols = {symbol for word in words for symbol in word} | {character for word in counts for character in word}
    pieces = sorted(symbols, key=lambda symbol: (len(symbol), symbol))
    merges = pair_merging.merge_pairs(
        np.array([pieces.index(symbol) for word in words for symbol in word]),
        np.array([len(word) for word in words]),
        np.array([*counts.values()]),
        pieces,
        join=lambda one, two: one + two.removeprefix("##"),
        vocab_size=vocab_size,
        min_frequency=1,
    )
    return set(pieces), [(pieces[left], pieces[right]) for left, right in merges]


@pytest.mark.parametrize("few", [0, 100])
def test_a_pair_that_arises_twice_has_its_last_position(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`#` and `###a` give `##a`, an existing piece: after that merge, `##a` and `##b` are neighbours again."""
    monkeypatch.setattr(pair_merging, "_FEW", few)
    merges = ours(TWICE, 60)[1]
    assert merges.index(("#", "###a")) < merges.index(("##a", "##b"))
    assert len(set(merges)) == len(merges)
    assert merges == library(TWICE, 60)[1]


@pytest.mark.parametrize("vocab_size", [8, 10, 12, 60])
def test_pieces_and_merges_at_any_size(vocab_size: int) -> None:
    assert ours(TWICE, vocab_size) == library(TWICE, vocab_size)

"""WordPiece: the same splits as Transformers and, except for ties, the same vocabulary as `tokenizers`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer
from transformers.models.bert_japanese.tokenization_bert_japanese import WordpieceTokenizer

from terakoya.errors import UserError
from terakoya.toolkit.tokenizers.wordpiece import WordPiece, bert_words, train_wordpiece

PIECES = ["[UNK]", "a", "ab", "##a", "##b", "##ba", "東", "##京", "##", "abc", "##c"]
VOCABULARY = {piece: id for id, piece in enumerate(PIECES)}


@settings(max_examples=50)
@given(word=st.text(st.sampled_from("abc東京# \u3000"), max_size=12) | st.just("ab" * 50) | st.just("ab" * 51))
def test_words_are_split_as_in_transformers(word: str) -> None:
    slow = WordpieceTokenizer(VOCABULARY, "[UNK]")
    assert WordPiece(VOCABULARY, 0).ids(word) == [VOCABULARY[piece] for piece in slow.tokenize(word)]


def without_ties(seed: int) -> Counter[str]:
    """Word counts in which the first merged pairs all have different counts."""
    draw = random.Random(seed)
    return Counter(
        {"".join(draw.choices("かがきぎ読c", k=draw.randint(1, 6))): draw.randint(1, 3000) for _ in range(500)}
    )


def library_vocabulary(counts: Counter[str], **options: int) -> list[str]:
    """The vocabulary from `tokenizers`, which accepts running text only."""
    tokenizer = BertWordPieceTokenizer(handle_chinese_chars=False, strip_accents=False, lowercase=False)
    lines = (f"{word} " * count for word, count in counts.items())
    tokenizer.train_from_iterator(lines, special_tokens=["[UNK]"], show_progress=False, **options)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=lambda piece: ids[piece])


@pytest.mark.parametrize(
    ("seed", "vocab_size", "min_frequency", "limit_alphabet"), [(0, 60, 2, 100), (1, 50, 2, 4), (2, 400, 20000, 100)]
)
def test_the_vocabulary_is_that_of_tokenizers(
    seed: int, vocab_size: int, min_frequency: int, limit_alphabet: int
) -> None:
    counts = without_ties(seed)
    options = {"vocab_size": vocab_size, "min_frequency": min_frequency, "limit_alphabet": limit_alphabet}
    ours = train_wordpiece(bert_words(counts), special_tokens=["[UNK]"], **options)
    field = library_vocabulary(counts, **options)
    assert len(ours) == len(field)
    # Merges in the same order; only the order of the ## characters is the hash table's there.
    assert [piece for piece in ours if len(piece.removeprefix("##")) > 1] == [
        piece for piece in field if len(piece.removeprefix("##")) > 1
    ]
    assert set(ours) == set(field)


def test_words_in_another_order_give_the_same_vocabulary() -> None:
    counts = {
        "".join(letters): 2 for letters in zip("あいうえおかきく", "たちつてとなにぬ", "はひふへほまみむ", strict=True)
    }
    options = {"vocab_size": 45, "min_frequency": 2, "limit_alphabet": 100, "special_tokens": ["[UNK]"]}
    backwards = dict(reversed(counts.items()))
    assert train_wordpiece(counts, **options) == train_wordpiece(backwards, **options)


def test_words_are_split_as_in_the_training_of_tokenizers() -> None:
    words = bert_words({"がっこう": 2, "a-b": 1, "a\u200bb": 1, "c d": 3, "。": 5, "\u0000": 1})
    assert words == {"がっこう": 2, "a": 1, "-": 1, "b": 1, "a\u200bb": 1, "c": 3, "d": 3, "。": 5}
    assert bert_words({"a\x01\x85b\ufffd": 1, "👩\u200d👧": 2}) == {"ab": 1, "👩\u200d👧": 2}


def test_alphabet_is_limited_to_the_most_frequent() -> None:
    options = {"vocab_size": 100, "min_frequency": 100, "limit_alphabet": 2, "special_tokens": []}
    assert train_wordpiece({"b": 3, "a": 2, "dc": 2, "e": 1}, **options) == ["a", "b"]


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="expected at least 6"):
        train_wordpiece({"abc": 2}, vocab_size=5, min_frequency=2, limit_alphabet=10, special_tokens=["[UNK]"])


def test_without_a_limit_characters_leave_a_quarter_of_the_vocabulary() -> None:
    # a is frequent and begins words alone; b to h are also inside them and take two pieces each
    counts = {"a": 100, **{f"a{letter}": 90 - number for number, letter in enumerate("bcdefgh")}}
    counts |= {letter: 50 - number for number, letter in enumerate("bcdefgh")}
    options = {"min_frequency": 1000, "limit_alphabet": None, "special_tokens": ["[UNK]"]}
    assert train_wordpiece(counts, vocab_size=16, **options) == [
        "[UNK]", *"abcdef", *(f"##{letter}" for letter in "bcdef")
    ]  # fmt: skip
    whole = train_wordpiece(counts, vocab_size=22, **options)
    assert len(whole) == 1 + 8 + 7 and train_wordpiece(counts, vocab_size=100, **options) == whole
    with pytest.raises(UserError, match=r"expected at least 16 .* got 2"):
        train_wordpiece(counts, vocab_size=2, **options)

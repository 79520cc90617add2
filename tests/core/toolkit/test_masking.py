"""Masking: the budget rule, exactly the same probability for every word, the rates, and only ordinary tokens change."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import CLS, FIRST, MASK, PAD, SEP, vocabulary

from terakoya.errors import UserError
from terakoya.toolkit.masking import IGNORED, MaskedRows, Masking, mask
from terakoya.toolkit.random_keys import draws, row_keys, streams

VOCABULARY = vocabulary(5000)


def batch_of(seed: int, batch: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, word starts, maskable and keys of random rows with frames, several documents and padding."""
    random = np.random.default_rng(seed)
    tokens = random.integers(FIRST, VOCABULARY.size, (batch, width)).astype(np.int32)
    tokens[random.random((batch, width)) < 0.05] = SEP
    tokens[:, 0] = CLS
    tokens[np.arange(width) >= random.integers(1, width + 1, batch)[:, None]] = PAD
    words = random.random((batch, width)) < random.choice([0.1, 0.6, 1.0])
    return tokens, words, ~VOCABULARY.is_special[tokens], row_keys(seed, 0, 0, np.arange(batch))


def on_the_circle(sizes: list[int], begin: Fraction, probability: Fraction) -> list[bool]:
    """Whether a window covers the end of each word of a circle, where words of `sizes` tokens lie in this order. The
    window is `probability` of the circle and begins at `begin`. Plain arithmetic, for any point of the circle."""
    around = sum(sizes)
    return [around - (begin - stop) % around <= probability * around for stop in accumulate(sizes)]


def spans_of(words: np.ndarray | None, maskable: np.ndarray) -> list[list[int]]:
    """The places of each word of a row."""
    spans: list[list[int]] = []
    for place in range(len(maskable)):
        if maskable[place]:
            if words is None or words[place] or place == 0 or not maskable[place - 1]:
                spans.append([])
            spans[-1].append(place)
    return spans


def slow_budget(words: np.ndarray | None, maskable: np.ndarray, key: int, probability: float) -> list[int]:
    """The positions of one row that the budget rule masks, in plain Python."""

    def draw(purpose: str, place: int) -> int:
        return int(draws(np.array([key], np.uint64), purpose, np.array([place]))[0])

    spans = spans_of(words, maskable)
    if not spans:
        return []
    tokens = [place for span in spans for place in span]
    point = int(streams(np.array([key], np.uint64), "mask budget")[0])
    token = tokens[(point >> 32) * len(tokens) >> 32]
    first = next(span for span in spans if token in span)
    others = sorted((span for span in spans if span != first), key=lambda span: (draw("mask", span[0]) >> 33, span[0]))
    begin = token - first[0] + Fraction(point % 2**32, 2**32)
    covered = on_the_circle([len(span) for span in (first, *others)], begin, Fraction(probability))
    return sorted(place for span, taken in zip((first, *others), covered, strict=True) if taken for place in span)


def places_of(masked: MaskedRows, batch: int, width: int) -> list[list[int]]:
    flat = masked.positions[: masked.count]
    return [(flat[flat // width == row] % width).tolist() for row in range(batch)]


@settings(max_examples=50)
@given(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 90), st.booleans(), st.sampled_from([0.02, 0.15, 0.4, 1.0])
)
def test_budget_rule(seed: int, batch: int, width: int, whole_words: bool, probability: float) -> None:
    tokens, words, maskable, keys = batch_of(seed, batch, width)
    starts = words if whole_words else None
    masked = mask(tokens, starts, maskable, keys, VOCABULARY, Masking(probability))
    expected = [
        slow_budget(words[row] if whole_words else None, maskable[row], int(keys[row]), probability)
        for row in range(batch)
    ]
    assert places_of(masked, batch, width) == expected
    slots = batch * max(1, int(probability * width + 0.5), math.ceil(masked.count / batch))
    assert len(masked.positions) == len(masked.labels) == slots
    flat = tokens.reshape(-1)
    assert np.array_equal(masked.labels[: masked.count], flat[masked.positions[: masked.count]])
    assert np.all(masked.labels[masked.count :] == IGNORED) and np.all(masked.positions[masked.count :] == 0)
    untouched = np.ones(tokens.size, bool)
    untouched[masked.positions[: masked.count]] = False
    assert np.array_equal(masked.input_ids.reshape(-1)[untouched], flat[untouched])
    assert not VOCABULARY.is_special[masked.labels[: masked.count]].any(), "special tokens and padding are unchanged"
    changed = masked.input_ids.reshape(-1)[~untouched]
    assert not VOCABULARY.is_special[changed[changed != MASK]].any(), "replacements are ordinary"


@pytest.mark.parametrize("sizes", [(1,), (7,), (1, 3), (2, 2, 1), (1, 1, 6, 2)])
@pytest.mark.parametrize("probability", [Fraction(3, 20), Fraction(1, 2), Fraction(9, 10), Fraction(1)])
def test_the_budget_rule_masks_every_word_with_exactly_the_probability(
    sizes: tuple[int, ...], probability: Fraction
) -> None:
    """Over all orders of the words and all points where the window can begin, in the word of a random token."""
    grid = 40  # the ends of words and of windows are multiples of 1/20: windows between two such points are alike
    taken = dict.fromkeys(range(len(sizes)), 0)
    for order in permutations(range(len(sizes))):
        for step in range(sizes[order[0]] * grid):  # as many points as the first word has: a token's word is first
            begin = Fraction(2 * step + 1, 2 * grid)
            covered = on_the_circle([sizes[word] for word in order], begin, probability)
            total = 0
            for word, is_taken in zip(order, covered, strict=True):
                taken[word] += is_taken
                total += is_taken * sizes[word]
            assert abs(total - probability * sum(sizes)) <= max(sizes)
    cases = math.factorial(len(sizes) - 1) * sum(sizes) * grid
    assert {word: Fraction(number, cases) for word, number in taken.items()} == dict.fromkeys(taken, probability)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "budgeted"),
    [(16, True), (16, False), (48, True), *(pytest.param(each, True, marks=pytest.mark.nightly) for each in (24, 128))],
)
def test_words_of_any_length_are_masked_alike(width: int, budgeted: bool) -> None:
    """In rows of any length too: names and numbers of many pieces are learned like particles of one."""
    random = np.random.default_rng(1)
    rows = 12_000 if width < 32 else 160_000 // width
    tokens = random.integers(FIRST, VOCABULARY.size, (rows, width)).astype(np.int32)
    tokens[:, 0] = CLS
    tokens[np.arange(width) >= random.integers(width // 2, width + 1, rows)[:, None]] = PAD
    words = random.random((rows, width)) < np.where(random.random((rows, width)) < 0.5, 0.9, 0.2)
    maskable = ~VOCABULARY.is_special[tokens]
    how = Masking(0.15, budgeted)
    masked = mask(tokens, words, maskable, row_keys(1, 0, 0, np.arange(rows)), VOCABULARY, how)
    is_masked = np.zeros(tokens.shape, bool)
    is_masked.reshape(-1)[masked.positions[: masked.count]] = True
    seen: dict[int, list[int]] = {}
    for row in range(rows):
        for span in spans_of(words[row], maskable[row]):
            assert is_masked[row, span].all() == is_masked[row, span].any(), "whole words"
            counts = seen.setdefault(min(len(span), 6), [0, 0])
            counts[0] += int(is_masked[row, span[0]])
            counts[1] += 1
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    for length, (hits, all_words) in seen.items():
        error = (0.15 * 0.85 / all_words) ** 0.5
        assert abs(hits / all_words - 0.15) < 4.5 * error < 0.06, f"words of {length} pieces: {hits / all_words:.4f}"
    assert abs(masked.count / np.count_nonzero(maskable) - 0.15) < 0.01


def test_a_budget_keeps_the_number_of_masked_tokens_near_the_same() -> None:
    tokens, words, maskable, keys = batch_of(7, 300, 64)
    budgets = 0.15 * np.count_nonzero(maskable, axis=1)
    for starts in (words, None):
        masked = mask(tokens, starts, maskable, keys, VOCABULARY, Masking(0.15))
        for row, places in enumerate(places_of(masked, 300, 64)):
            spans = spans_of(None if starts is None else words[row], maskable[row])
            assert abs(len(places) - budgets[row]) <= max(map(len, spans), default=0)
            if starts is None:
                assert len(places) in (math.floor(budgets[row]), math.ceil(budgets[row]))


@pytest.mark.parametrize("budgeted", [True, False])
def test_a_row_is_masked_in_the_same_way_in_any_batch(budgeted: bool) -> None:
    tokens, words, maskable, keys = batch_of(3, 9, 64)
    how = Masking(0.15, budgeted)
    whole = mask(tokens, words, maskable, keys, VOCABULARY, how)
    for row in range(9):
        one = slice(row, row + 1)
        for width in (64, 80):
            pad = ((0, 0), (0, width - 64))
            alone = mask(
                np.pad(tokens[one], pad, constant_values=PAD),
                np.pad(words[one], pad),
                np.pad(maskable[one], pad),
                keys[one],
                VOCABULARY,
                how,
            )
            assert np.array_equal(alone.input_ids[:, :64], whole.input_ids[one])
    other = mask(tokens, words, maskable, keys + np.uint64(1), VOCABULARY, how)
    assert not np.array_equal(other.input_ids, whole.input_ids)


@pytest.mark.parametrize("budgeted", [True, False])
@pytest.mark.parametrize("whole_words", [True, False])
@pytest.mark.parametrize("replace", [(0.8, 0.1), (1.0, 0.0), (0.5, 0.5), (0.0, 0.0)])
def test_rates(budgeted: bool, whole_words: bool, replace: tuple[float, float]) -> None:
    random = np.random.default_rng(1)
    tokens = random.integers(FIRST, VOCABULARY.size, (200, 512)).astype(np.int32)
    words = random.random(tokens.shape) < 0.6
    keys = row_keys(5, 0, 0, np.arange(200))
    masked = mask(
        tokens,
        words if whole_words else None,
        np.ones(tokens.shape, bool),
        keys,
        VOCABULARY,
        Masking(0.15, budgeted, replace),
    )
    if budgeted:
        assert abs(masked.count / tokens.size - 0.15) < 0.0006
    else:
        assert abs(masked.count / tokens.size - 0.15) < 0.006
    assert len(masked.positions) == 200 * max(77, math.ceil(masked.count / 200)), "512 x 0.15 = 76.8"
    became = masked.input_ids.reshape(-1)[masked.positions[: masked.count]]
    labels = masked.labels[: masked.count]
    kept = 1 - sum(replace) + replace[1] / len(VOCABULARY.ordinary)
    tolerance = 4 * 0.5 / masked.count**0.5
    assert abs(np.mean(became == MASK) - replace[0]) < tolerance
    assert abs(np.mean(became == labels) - kept) < tolerance
    fresh = became[(became != MASK) & (became != labels)]
    if replace[1]:
        assert abs(fresh.mean() - VOCABULARY.ordinary.mean()) < 0.05 * VOCABULARY.size
        assert len(np.unique(fresh)) > 0.6 * min(len(fresh), len(VOCABULARY.ordinary))
    by_place = np.bincount(masked.positions[: masked.count] % 512, minlength=512)
    assert by_place.min() > 8 and by_place.max() < 60, "every place alike (30 expected)"


def test_random_tokens_are_uniform() -> None:
    tokens = np.full((400, 512), FIRST, np.int32)
    keys = row_keys(5, 0, 0, np.arange(400))
    masked = mask(tokens, None, tokens > 0, keys, VOCABULARY, Masking(0.9, replace=(0.1, 0.8)))
    became = masked.input_ids.reshape(-1)[masked.positions[: masked.count]]
    seen = np.bincount(became, minlength=VOCABULARY.size)[VOCABULARY.ordinary[1:]]  # the first is what stood there
    expected = seen.sum() / len(seen)
    assert abs(seen.sum() / masked.count - 0.8) < 0.01
    squares = float(((seen - expected) ** 2 / expected).sum())
    assert abs(squares - len(seen)) < 5 * (2 * len(seen)) ** 0.5, "chi-square"


def test_batches_of_very_many_rows() -> None:
    """They are sorted by another method, with the same result."""
    tokens, words, maskable, keys = batch_of(11, 5000, 12)
    whole = mask(tokens, words, maskable, keys, VOCABULARY, Masking(0.3))
    parts = [
        mask(tokens[part], words[part], maskable[part], keys[part], VOCABULARY, Masking(0.3))
        for part in (slice(0, 2500), slice(2500, 5000))
    ]
    assert np.array_equal(whole.input_ids, np.concatenate([part.input_ids for part in parts]))


def test_tokens_of_a_word_are_replaced_one_by_one() -> None:
    tokens = np.full((100, 100), FIRST, np.int32)
    words = np.zeros(tokens.shape, bool)
    words[:, ::5] = True
    keys = row_keys(5, 0, 0, np.arange(100))
    masked = mask(tokens, words, tokens > 0, keys, VOCABULARY, Masking(0.15))
    by_word = masked.input_ids.reshape(-1)[masked.positions[: masked.count]].reshape(-1, 5) == MASK
    assert np.mean(by_word.any(axis=1) & ~by_word.all(axis=1)) > 0.5
    assert masked.count == 1500
    fresh = masked.input_ids.reshape(-1)[masked.positions[: masked.count]].reshape(-1, 5)
    assert np.any(np.ptp(fresh, axis=1)[fresh[:, 0] > FIRST] > 0), "tokens of a word are replaced by different ones"


def test_short_rows() -> None:
    """A word longer than the row's budget is masked as often as any other, and a row of special tokens never."""
    tokens = np.array([[CLS, 20, 21, 22, SEP], [CLS, 20, 21, 22, SEP], [CLS, SEP, PAD, PAD, PAD]] * 1000, np.int32)
    words = np.array([[0, 1, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]] * 1000, bool)
    maskable = ~VOCABULARY.is_special[tokens]
    masked = mask(tokens, words, maskable, row_keys(0, 0, 0, np.arange(3000)), VOCABULARY, Masking(0.15))
    numbers = np.array([len(places) for places in places_of(masked, 3000, 5)]).reshape(1000, 3)
    assert set(numbers[:, 0]) == {0, 1} and set(numbers[:, 1]) == {0, 3} and not numbers[:, 2].any()
    assert np.all(np.abs(numbers[:, :2].mean(axis=0) / 3 - 0.15) < 0.05)
    assert len(masked.positions) == 3000
    empty = mask(
        tokens,
        words,
        np.zeros_like(maskable),
        row_keys(0, 0, 0, np.arange(3000)),
        VOCABULARY,
        Masking(0.15),
    )
    assert empty.count == 0 and np.array_equal(empty.input_ids, tokens)


@pytest.mark.slow
def test_the_budget_rule_in_large_batches() -> None:
    """Of these, most words are not even sorted."""
    tokens, words, maskable, keys = batch_of(13, 50, 200)
    for starts in (words, None):
        masked = mask(tokens, starts, maskable, keys, VOCABULARY, Masking(0.15))
        assert places_of(masked, 50, 200) == [
            slow_budget(None if starts is None else words[row], maskable[row], int(keys[row]), 0.15)
            for row in range(50)
        ]


def test_vocabularies_that_cannot_mask_are_refused() -> None:
    tokens, words, maskable, keys = batch_of(0, 2, 10)
    for bad in ({"mask": None}, {"special": tuple(range(VOCABULARY.size))}):
        broken = type(VOCABULARY)(**{**VOCABULARY.model_dump(), **bad})
        with pytest.raises(UserError, match="masking"):
            mask(tokens, words, maskable, keys, broken, Masking(0.15))

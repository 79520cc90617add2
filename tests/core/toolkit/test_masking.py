"""Masking: the exact budget rule, the rates, and only ordinary tokens change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_store import CLS, FIRST, MASK, PAD, SEP, vocabulary

from terakoya.errors import UserError
from terakoya.toolkit.masking import IGNORED, MaskedRows, mask
from terakoya.toolkit.random_keys import draws, row_keys

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


def slow_budget(words: np.ndarray | None, maskable: np.ndarray, key: int, probability: float) -> list[int]:
    """The positions of one row that the budget rule masks, in plain Python."""
    spans: list[list[int]] = []
    for place in range(len(maskable)):
        if maskable[place]:
            if words is None or words[place] or place == 0 or not maskable[place - 1]:
                spans.append([])
            spans[-1].append(place)
    budget = max(1, int(probability * int(maskable.sum()) + 0.5))
    drawn = {span[0]: int(draws(np.array([key], np.uint64), "mask", np.array([span[0]]))[0]) >> 32 for span in spans}
    taken: list[int] = []
    for span in sorted(spans, key=lambda span: (drawn[span[0]], span[0])):
        if len(taken) + len(span) <= budget:
            taken += span
    return sorted(taken)


def places_of(masked: MaskedRows, batch: int, width: int) -> list[list[int]]:
    flat = masked.positions[: masked.count]
    return [(flat[flat // width == row] % width).tolist() for row in range(batch)]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 90), st.booleans(), st.sampled_from([0.02, 0.15, 0.4, 1.0])
)
def test_budget_rule(seed: int, batch: int, width: int, whole_words: bool, probability: float) -> None:
    tokens, words, maskable, keys = batch_of(seed, batch, width)
    starts = words if whole_words else None
    masked = mask(tokens, starts, maskable, keys, probability=probability, vocabulary=VOCABULARY)
    expected = [
        slow_budget(words[row] if whole_words else None, maskable[row], int(keys[row]), probability)
        for row in range(batch)
    ]
    assert places_of(masked, batch, width) == expected
    slots = batch * max(1, int(probability * width + 0.5))
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


@pytest.mark.parametrize("budgeted", [True, False])
def test_a_row_is_masked_in_the_same_way_in_any_batch(budgeted: bool) -> None:
    tokens, words, maskable, keys = batch_of(3, 9, 64)
    options = {"probability": 0.15, "vocabulary": VOCABULARY, "budgeted": budgeted}
    whole = mask(tokens, words, maskable, keys, **options)  # type: ignore[arg-type]
    for row in range(9):
        one = slice(row, row + 1)
        for width in (64, 80):
            pad = ((0, 0), (0, width - 64))
            alone = mask(
                np.pad(tokens[one], pad, constant_values=PAD),
                np.pad(words[one], pad),
                np.pad(maskable[one], pad),
                keys[one],
                **options,  # type: ignore[arg-type]
            )
            assert np.array_equal(alone.input_ids[:, :64], whole.input_ids[one])
    other = mask(tokens, words, maskable, keys + np.uint64(1), **options)  # type: ignore[arg-type]
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
        probability=0.15,
        vocabulary=VOCABULARY,
        budgeted=budgeted,
        replace=replace,
    )
    if budgeted:
        assert masked.count == 200 * 77, "512 x 0.15 = 76.8"
    else:
        assert abs(masked.count / tokens.size - 0.15) < 0.006
        assert len(masked.positions) == max(200 * 77, masked.count)
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


@pytest.mark.parametrize("per_word", [False, True])
def test_random_tokens_are_uniform(per_word: bool) -> None:
    tokens = np.full((400, 512), FIRST, np.int32)
    keys = row_keys(5, 0, 0, np.arange(400))
    masked = mask(
        tokens, None, tokens > 0, keys, probability=0.9, vocabulary=VOCABULARY, replace=(0.1, 0.8), per_word=per_word
    )
    became = masked.input_ids.reshape(-1)[masked.positions[: masked.count]]
    seen = np.bincount(became, minlength=VOCABULARY.size)[VOCABULARY.ordinary[1:]]  # the first is what stood there
    expected = seen.sum() / len(seen)
    assert abs(seen.sum() / masked.count - 0.8) < 0.01
    squares = float(((seen - expected) ** 2 / expected).sum())
    assert abs(squares - len(seen)) < 5 * (2 * len(seen)) ** 0.5, "chi-square"


def test_batches_of_very_many_rows() -> None:
    """They are sorted by another method, with the same result."""
    tokens, words, maskable, keys = batch_of(11, 5000, 12)
    whole = mask(tokens, words, maskable, keys, probability=0.3, vocabulary=VOCABULARY)
    parts = [
        mask(tokens[part], words[part], maskable[part], keys[part], probability=0.3, vocabulary=VOCABULARY)
        for part in (slice(0, 2500), slice(2500, 5000))
    ]
    assert np.array_equal(whole.input_ids, np.concatenate([part.input_ids for part in parts]))


def test_replacement_by_token_or_by_word() -> None:
    tokens = np.full((100, 100), FIRST, np.int32)
    words = np.zeros(tokens.shape, bool)
    words[:, ::5] = True
    keys = row_keys(5, 0, 0, np.arange(100))
    options = {"probability": 0.15, "vocabulary": VOCABULARY}
    for per_word in (False, True):
        masked = mask(tokens, words, tokens > 0, keys, per_word=per_word, **options)  # type: ignore[arg-type]
        by_word = masked.input_ids.reshape(-1)[masked.positions[: masked.count]].reshape(-1, 5) == MASK
        mixed = np.mean(by_word.any(axis=1) & ~by_word.all(axis=1))
        assert mixed == 0 if per_word else mixed > 0.5
        assert masked.count == 1500
    fresh = masked.input_ids.reshape(-1)[masked.positions[: masked.count]].reshape(-1, 5)
    assert np.any(np.ptp(fresh, axis=1)[fresh[:, 0] > FIRST] > 0), "tokens of a word are replaced by different ones"


def test_short_rows() -> None:
    """At least one token where a word of one token fits; none where every word is longer than the budget."""
    tokens = np.array([[CLS, 20, 21, 22, SEP], [CLS, 20, 21, 22, SEP], [CLS, SEP, PAD, PAD, PAD]], np.int32)
    words = np.array([[0, 1, 1, 1, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    maskable = ~VOCABULARY.is_special[tokens]
    keys = row_keys(0, 0, 0, np.arange(3))
    masked = mask(tokens, words, maskable, keys, probability=0.15, vocabulary=VOCABULARY)
    assert [len(places) for places in places_of(masked, 3, 5)] == [1, 0, 0]
    assert len(masked.positions) == 3
    empty = mask(tokens, words, np.zeros_like(maskable), keys, probability=0.15, vocabulary=VOCABULARY)
    assert empty.count == 0 and np.array_equal(empty.input_ids, tokens)


def test_vocabularies_that_cannot_mask_are_refused() -> None:
    tokens, words, maskable, keys = batch_of(0, 2, 10)
    for bad in ({"mask": None}, {"special": tuple(range(VOCABULARY.size))}):
        broken = type(VOCABULARY)(**{**VOCABULARY.model_dump(), **bad})
        with pytest.raises(UserError, match="masking"):
            mask(tokens, words, maskable, keys, probability=0.15, vocabulary=broken)

"""Keys: fixed values, uniform random numbers, permutations that are bijections."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terakoya.toolkit.random_keys import bernoulli, draws, hash_u64, integers_below, permute, row_keys

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "keys.json").read_text())
U64 = st.integers(0, 2**64 - 1)


def test_golden_values() -> None:
    for case in GOLDEN["hash_u64"]:
        assert hash_u64(*case["parts"]) == int(case["value"], 16), case
    for case in GOLDEN["permute"]:
        assert permute(np.arange(case["n"]), case["n"], case["key"]).tolist() == case["images"]


def test_first_step_is_splitmix64() -> None:
    """The first output of splitmix64 with the seed 0, as published by its authors."""
    assert hash_u64(0) == 0xE220A8397B1DCDAF


@settings(max_examples=30)
@given(st.lists(U64, min_size=1, max_size=3), st.lists(U64, min_size=1, max_size=5), st.text(max_size=5))
def test_arrays_and_numbers_agree(parts: list[int], array: list[int], name: str) -> None:
    vector = np.array(array, np.uint64)
    expected = [hash_u64(*parts, each, name, 7) for each in array]
    assert hash_u64(*parts, vector, name, 7).tolist() == expected
    rows = row_keys(5, 2, 0, vector)
    assert draws(rows, name, np.arange(len(array))).tolist() == [
        hash_u64(5, 2, 0, each, name, position) for position, each in enumerate(array)
    ]
    grid = draws(rows[:, None], name, np.arange(3))
    assert grid.shape == (len(array), 3) and int(grid[-1, 2]) == hash_u64(5, 2, 0, array[-1], name, 2)


def test_keys_differ_in_every_part() -> None:
    keys = [
        key
        for seed in range(3)
        for epoch in range(3)
        for store in range(3)
        for key in row_keys(seed, epoch, store, np.arange(100)).tolist()
    ]
    assert len(set(keys)) == len(keys) == 2700


def test_draws_are_uniform() -> None:
    numbers = draws(row_keys(1, 2, 3, np.arange(200))[:, None], "test", np.arange(500)).ravel()
    for bit in range(64):
        share = float(np.mean(numbers >> np.uint64(bit) & np.uint64(1)))
        assert abs(share - 0.5) < 5 * 0.5 / 100_000**0.5, bit
    counts = np.bincount(integers_below(numbers, 7), minlength=7)
    assert counts.max() - counts.min() < 0.05 * counts.mean()
    assert abs(bernoulli(numbers, 0.15).mean() - 0.15) < 0.005
    assert bernoulli(numbers, 1.0).all() and not bernoulli(numbers, 0.0).any()


@settings(max_examples=50)
@given(st.integers(1, 3000), U64)
def test_permutation_is_a_bijection(n: int, key: int) -> None:
    images = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(images), np.arange(n))
    assert permute(np.array([n - 1]), n, key)[0] == images[-1]


def test_small_permutations_are_bijections() -> None:
    """Small ranges repeat the permutation often, because the rectangle has unused cells."""
    for n in range(1, 60):
        for key in range(20):
            assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n)), (n, key)


def test_permutations_are_uniform() -> None:
    orders = Counter(tuple(permute(np.arange(4), 4, key).tolist()) for key in range(2400))
    assert len(orders) == 24 and min(orders.values()) > 60 and max(orders.values()) < 150


def test_permutation_of_a_huge_range_needs_no_memory() -> None:
    n = 10**15 + 37
    index = np.arange(n - 1000, n)
    images = permute(index, n, 5)
    assert len(set(images.tolist())) == 1000 and images.min() >= 0 and images.max() < n


def test_zero_dimensional_arrays_are_refused() -> None:
    with pytest.raises(AssertionError):
        hash_u64(np.array(3))

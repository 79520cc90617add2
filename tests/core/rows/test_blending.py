"""Blends: every store keeps its share at every row, and positions follow from a formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terakoya.errors import UserError
from terakoya.rows.blending import PERIOD, Blend, integer_weights

WEIGHTS = st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 0)


@settings(max_examples=15)
@given(WEIGHTS)
def test_each_store_stays_within_one_row_of_its_share(weights: list[int]) -> None:
    try:
        blend = Blend(weights)
    except UserError:
        return
    rows = PERIOD + 1000
    stores, indices = blend.positions(0, rows)
    for store, weight in enumerate(blend.weights):
        consumed = np.cumsum(stores == store)
        assert np.abs(consumed - np.arange(1, rows + 1) * weight / PERIOD).max() < 1
        assert np.array_equal(indices[stores == store], np.arange(consumed[-1]))


@settings(max_examples=20)
@given(st.integers(0, 10**12), st.integers(1, 500))
def test_any_range_is_the_same_rows(start: int, length: int) -> None:
    blend = Blend([5, 3, 2.5])
    stores, indices = blend.positions(start, start + length)
    first, last = (blend.positions(row, row + 1) for row in (start, start + length - 1))
    assert [each.item() for each in (*first, *last)] == [stores[0], indices[0], stores[-1], indices[-1]]
    before, after = blend.rows_per_store(start), blend.rows_per_store(start + length)
    assert [b - a for a, b in zip(before, after, strict=True)] == np.bincount(stores, minlength=3).tolist()
    assert sum(after) == start + length


def test_largest_remainder() -> None:
    assert integer_weights([1, 1, 1]) == (21846, 21845, 21845)
    assert integer_weights([0.7, 0.3]) == (45875, 19661)
    assert integer_weights([3]) == (PERIOD,)
    assert integer_weights([1, 0]) == (PERIOD, 0)


@pytest.mark.parametrize("weights", [[], [0.0], [1, -1], [float("nan")], [1e9, 1]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError):
        integer_weights(weights)

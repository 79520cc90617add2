"""The check of an initializer fails for weights that are no mean of old rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest

from terakoya.components import Initializer, VocabularyChange
from terakoya_contract.initializer import check_weights
from terakoya_contract.results import CheckFailed
from terakoya_contract.settings import Case

numbers = itertools.count(1)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (lambda change: [{0: 1.0}], "returned 1 mappings, expected one for each of 5 ids"),
        (lambda change: [{99: 1.0}] * 5, "weighs id 99, which the old vocabulary does not have"),
        (lambda change: [{0: 1.5, 1: -0.5}] * 5, "expected positive numbers"),
        (lambda change: [{0: 0.5, 1: 0.6}] * 5, "have the sum 1.1, expected at most 1"),
        (lambda change: [{next(numbers) % 9: 1.0} for _ in change.missing], "called again"),
    ],
)
def test_a_broken_initializer_fails(
    weights: Callable[[VocabularyChange], list[Mapping[int, float]]], reason: str
) -> None:
    class Broken(Initializer):
        """A broken one."""

        def weights(self, change: VocabularyChange) -> list[Mapping[int, float]]:
            return weights(change)

    with pytest.raises(CheckFailed, match=reason):
        check_weights(Case("initializers", "broken", Broken))

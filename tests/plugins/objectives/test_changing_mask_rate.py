"""A share of masked tokens that changes along the run: by the run's progress alone, with batches of one shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_masked_lm import VOCABULARY, rows

from terakoya.components.rows import Rows
from terakoya.toolkit.changing_rates import ChangingRate
from terakoya_contract.objective import select_rows
from terakoya_plugins.objectives.masked_lm import MaskedLM
from terakoya_plugins.objectives.replaced_token import ReplacedToken

FALLS = ChangingRate(start=0.4, end=0.1)
DOCUMENTS = [[400], [400], [150, 250]]


def long_rows() -> Rows:
    return rows(DOCUMENTS, width=400)


@pytest.mark.parametrize("objective", [MaskedLM, ReplacedToken])
@pytest.mark.parametrize("budgeted", [True, False])
def test_the_share_of_masked_tokens_follows_the_progress_of_the_run(objective: Any, budgeted: bool) -> None:
    settings = {"whole_word_mask": False, "budgeted": budgeted}
    changing = objective(mlm_probability=FALLS, **settings)
    sizes = set()
    for progress, share in ((0.0, 0.4), (0.5, 0.25), (1.0, 0.1)):
        batch = changing.collate(replace(long_rows(), progress=progress), VOCABULARY)
        fixed = objective(mlm_probability=share, **settings).collate(long_rows(), VOCABULARY)
        assert np.array_equal(batch.arrays["input_ids"], fixed.arrays["input_ids"])
        assert batch.counts == fixed.counts
        assert abs(batch.counts["masked"] / batch.counts["tokens"] - share) < (0.01 if budgeted else 0.05)
        sizes.add(batch.arrays["masked_positions"].shape)
    assert len(sizes) == 1 or not budgeted, "a compiled model would be compiled again for each shape"


def test_validation_and_every_other_use_outside_of_a_step_mask_at_the_end_of_the_change() -> None:
    one, other = (MaskedLM(mlm_probability=rate).collate(long_rows(), VOCABULARY) for rate in (FALLS, 0.1))
    assert np.array_equal(one.arrays["input_ids"], other.arrays["input_ids"])


def test_a_row_is_masked_alike_in_any_micro_batch() -> None:
    objective, all_rows = MaskedLM(mlm_probability=FALLS), replace(long_rows(), progress=0.3)
    whole = objective.collate(all_rows, VOCABULARY).arrays["input_ids"]
    parts = [
        objective.collate(select_rows(all_rows, slice(at, at + 1)), VOCABULARY).arrays["input_ids"] for at in range(3)
    ]
    assert np.array_equal(np.concatenate(parts), whole)

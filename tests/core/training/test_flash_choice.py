"""Why a run on a GPU does not take flash, what that costs, and which presets take it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from terakoya.config.parameters import Parameters
from terakoya.toolkit.architectures import attention

GPU = torch.device("cuda", 0)
PRESETS = Path(__file__).parents[3] / "parameters"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"precision": "bf16", "dropout": 0.0}, ""),
        ({"precision": "fp16", "dropout": 0.0}, ""),
        ({"precision": "bf16", "dropout": 0.1}, "dropout 0.1"),
        ({"precision": "fp32", "dropout": 0.0}, "precision is fp32"),
        ({"precision": "bf16", "dropout": 0.0, "plain_softmax": False}, "soft cap"),
        ({"precision": "bf16", "dropout": 0.0, "document_masking": "mask_4d"}, "masks or biases its scores"),
    ],
)
def test_a_reason_is_given_exactly_where_auto_is_not_flash(facts: dict[str, Any], words: str) -> None:
    reason = attention.why_not_flash(**facts)
    assert (attention.choose("auto", device=GPU, **facts) == "flash") == (not reason)
    assert words in reason and bool(words) == bool(reason)


def test_scores_that_no_document_needs_are_counted() -> None:
    assert attention.wasted_scores(np.zeros((2, 8), dtype=np.int64)) == 1.0
    assert attention.wasted_scores(np.array([[0, 0, 0, 0, 1, 1, 1, 1]])) == 2.0
    assert attention.wasted_scores(np.array([[0, 0, 0, 0, -1, -1, -1, -1]])) == 4.0


@pytest.mark.parametrize("name", ["bert_base", "bert_large", "electra_base", "electra_small", "roberta_base"])
def test_presets_of_full_size_leave_flash_possible_and_keep_hidden_dropout(name: str) -> None:
    architecture: Any = Parameters.load(PRESETS / f"{name}.json").architecture
    assert architecture.attention_probs_dropout_prob == 0.0
    assert architecture.hidden_dropout_prob == 0.1

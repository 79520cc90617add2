"""Why a run on a GPU does not take flash, what that costs, and which presets take it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy

from terakoya.config.parameters import Parameters
from terakoya.rows.loader import Loader
from terakoya.rows.row_source import RowSource
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.architectures import attention
from terakoya.training.model.build import build_module
from terakoya.training.model.kernels import choose_attention

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
    assert (attention.choose("auto", device=GPU, length=512, **facts) == "flash") == (not reason)
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


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"precision": "bf16"}, GPU, "attention sdpa, not flash: the attention has dropout 0.1"),
        ({"precision": "bf16", "attention": "sdpa"}, GPU, ""),  # as the user wants it
        ({"precision": "bf16"}, torch.device("cpu"), ""),
    ],
)
def test_a_run_on_a_gpu_says_why_auto_is_not_flash_and_what_that_costs(
    changes: dict[str, Any], device: torch.device, words: str, store: Path
) -> None:
    parameters = Parameters.from_dict(toy.parameters(store, **changes), source="test")
    opened = TokenStore.open(store)
    loader = Loader([RowSource(opened, parameters.objective.row_layout(), sequence_length=32, seed=3)], [1.0])
    said: list[str] = []
    module = build_module(parameters, opened.facts.vocabulary)
    assert choose_attention(parameters, module, loader, device, say=said.append) == "sdpa"
    assert len(said) == bool(words)
    if words:
        factor = attention.wasted_scores(loader.load(0, 256).document_ids)
        assert said[0].startswith(words) and f"computes {factor:.1f} times the scores" in said[0] and factor > 1


def test_a_run_that_takes_flash_says_nothing_of_it(store: Path) -> None:
    raw = toy.parameters(store, precision="bf16")
    parameters = Parameters.from_dict({**raw, "architecture": toy.without_dropout(raw["architecture"])}, source="test")
    opened = TokenStore.open(store)
    loader = Loader([RowSource(opened, parameters.objective.row_layout(), sequence_length=32, seed=3)], [1.0])
    said: list[str] = []
    module = build_module(parameters, opened.facts.vocabulary)
    assert choose_attention(parameters, module, loader, GPU, say=said.append) == "flash" and not said

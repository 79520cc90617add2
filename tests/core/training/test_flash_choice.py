"""Why a run on a GPU does not take flash, what that costs, and which presets take it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
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
        ({"precision": "bf16", "dropout": 0.0, "head_sizes": [64, 256]}, ""),
        ({"precision": "bf16", "dropout": 0.0, "head_sizes": [26, 64]}, "heads have 26 channels"),
        ({"precision": "bf16", "dropout": 0.0, "head_sizes": [64, 264]}, "heads have 264 channels"),
    ],
)
def test_a_reason_is_given_exactly_where_auto_is_not_flash(facts: dict[str, Any], words: str) -> None:
    reason = attention.why_not_flash(device=GPU, **facts)
    assert (attention.choose("auto", device=GPU, length=512, **facts) == "flash") == (not reason)
    assert words in reason and bool(words) == bool(reason)


@pytest.mark.parametrize(
    ("capability", "backend"), [((7, 0), "sdpa"), ((7, 5), "sdpa"), ((8, 0), "flash"), ((9, 0), "flash")]
)
def test_a_gpu_before_ampere_does_not_take_flash(
    capability: tuple[int, int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`"precision": "auto"` is fp16 there, and torch's kernel refuses the card in the first step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    device = torch.device("cuda", 64 + 10 * capability[0] + capability[1])  # what is known of a device is cached
    run: dict[str, Any] = {"device": device, "length": 512, "precision": "fp16", "dropout": 0.0}
    assert attention.choose("auto", **run) == backend
    if backend == "sdpa":
        with pytest.raises(UserError, match="Tesla T4 is older than Ampere"):
            attention.choose("flash", **run)


@pytest.mark.parametrize(("heads", "size"), [(4, 8), (2, 16), (1, 32)])
def test_the_channels_of_heads_are_those_of_the_model(heads: int, size: int, store: Path) -> None:
    raw = toy.parameters(store, precision="bf16")
    raw["architecture"] = toy.without_dropout(raw["architecture"]) | {"hidden_size": 32, "num_attention_heads": heads}
    parameters = Parameters.from_dict(raw, source="test")
    module = build_module(parameters, TokenStore.open(store).facts.vocabulary)
    assert attention.find_facts(module, "bf16", "attention_interface")["head_sizes"] == [size]


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

"""Models on tensors without data: copies of modules, and adapters."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from terakoya.config.parameters import Parameters
from terakoya.estimation.fake_step import fake_tensors, model_sizes
from terakoya.estimation.synthetic_rows import synthetic_vocabulary

PRESETS = Path(__file__).resolve().parents[3] / "parameters"
VOCABULARY = synthetic_vocabulary(100, 32)


def test_a_copy_of_a_module_shares_the_mode_of_its_tensors() -> None:
    """torch copies the mode with each tensor, and with it pointers that two owners free: Python crashes later."""
    with fake_tensors(VOCABULARY) as (fake, _):
        module = nn.BatchNorm1d(4)
        module.other = module.weight
        frozen = nn.Linear(2, 2).requires_grad_(False)
        copied = copy.deepcopy(module)
        assert copied.weight is not module.weight and copied.other is copied.weight, "tied as before"
        for each in (copied.weight, copied.running_mean):
            assert each.fake_mode is fake
        assert isinstance(copied.weight, nn.Parameter) and not isinstance(copied.running_mean, nn.Parameter)
        assert [each.requires_grad for each in copied.parameters()] == [True, True]
        assert not any(each.requires_grad for each in copy.deepcopy(frozen).parameters())
    kept = nn.Linear(2, 2)
    assert torch.equal(copy.deepcopy(kept).weight, kept.weight), "and nothing of it stays"


@pytest.mark.slow
def test_models_that_share_embeddings_are_measured_beside_others() -> None:
    """A DeBERTa V3 exports a copy of its discriminator."""
    for name in ("deberta_v3_base", "electra_base", "deberta_v3_base"):
        parameters = Parameters.load(PRESETS / f"{name}.json", ["architecture.num_hidden_layers=1"])
        sizes = model_sizes(parameters, VOCABULARY, context=32.0)
        assert sizes.model_bytes > 0 and sizes.trained == sizes.parameters > 7e6


@pytest.mark.slow
def test_adapters_are_measured() -> None:
    sizes = model_sizes(Parameters.load(PRESETS / "tiny_lora.json"), VOCABULARY, context=32.0)
    width, rank, layers = 256, 8, 4
    assert sizes.trained == layers * rank * ((3 + 1) * width + 2 * width + 2 * 5 * width)
    assert sizes.saved_bytes < sizes.model_bytes

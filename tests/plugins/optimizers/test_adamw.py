"""AdamW against the published formulas in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from terakoya_plugins.optimizers.adamw import AdamW


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_follows_the_published_update(bias_correction: bool, fused: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    settings = AdamW(learning_rate=0.01, weight_decay=0.1, eps=1e-6, bias_correction=bias_correction)
    optimizer = settings.build(layer, fused=fused)
    values = {name: value.detach().double().numpy().copy() for name, value in layer.named_parameters()}
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    draw = np.random.default_rng(0)
    for step in range(1, 6):
        for name, parameter in layer.named_parameters():
            gradient = draw.normal(size=values[name].shape)
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            upper = first[name] / (1 - 0.9**step if bias_correction else 1.0)
            lower = second[name] / (1 - 0.999**step if bias_correction else 1.0)
            decay = 0.1 if name == "weight" else 0.0
            values[name] = values[name] * (1 - 0.01 * decay) - 0.01 * upper / (np.sqrt(lower) + 1e-6)
        optimizer.step()
    for name, parameter in layer.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), values[name], rtol=2e-5, atol=1e-6)


def test_biases_and_norms_are_not_decayed() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    decayed, others = AdamW(weight_decay=0.01).build(module, fused=False).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4), (2, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (2,)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)


def test_frozen_parameters_are_left_out() -> None:
    module = nn.Linear(4, 2)
    module.weight.requires_grad_(False)
    groups = AdamW().build(module, fused=False).param_groups
    assert [tuple(p.shape) for group in groups for p in group["params"]] == [(2,)]

"""Lion against the published formulas in float64."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from terakoya.errors import UserError
from terakoya_plugins.optimizers.lion import Lion


def test_follows_the_published_update() -> None:
    pytest.importorskip("lion_pytorch", reason='needs `pip install "terakoya[lion]"`')
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    optimizer = Lion(learning_rate=0.01, weight_decay=0.5, betas=(0.9, 0.99)).build(layer, fused=True)
    values = {name: value.detach().double().numpy().copy() for name, value in layer.named_parameters()}
    moment = {name: np.zeros_like(value) for name, value in values.items()}
    draw = np.random.default_rng(0)
    for _ in range(4):
        for name, parameter in layer.named_parameters():
            gradient = draw.normal(size=values[name].shape)
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
            direction = np.sign(0.9 * moment[name] + 0.1 * gradient)
            values[name] -= 0.01 * (direction + (0.5 if name == "weight" else 0.0) * values[name])
            moment[name] = 0.99 * moment[name] + 0.01 * gradient
        optimizer.step()
    for name, parameter in layer.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), values[name], rtol=1e-5, atol=1e-6)


def test_a_group_without_gradients_stays() -> None:
    pytest.importorskip("lion_pytorch", reason='needs `pip install "terakoya[lion]"`')
    layer = nn.Linear(4, 3)
    optimizer = Lion(learning_rate=0.01).build(layer, fused=True)
    assert len(optimizer.param_groups) == 2
    layer.weight.grad = torch.ones_like(layer.weight)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer.step()
    assert torch.equal(layer.bias, bias) and not torch.equal(layer.weight, weight)
    assert len(optimizer.param_groups) == 2


def test_it_is_elementwise() -> None:
    assert Lion.elementwise, "so ZeRO may split tensors"


def test_without_lion_pytorch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lion_pytorch.foreach", None)
    monkeypatch.delitem(sys.modules, "terakoya_plugins.optimizers.lion.by_groups", raising=False)
    with pytest.raises(UserError, match=r'optimizer lion: .*pip install "terakoya\[lion\]"'):
        Lion().build(nn.Linear(2, 2), fused=False)

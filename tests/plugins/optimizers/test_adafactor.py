"""Adafactor against the published formulas in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from terakoya_plugins.optimizers.adafactor import Adafactor, without_waiting


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def test_follows_the_published_update() -> None:
    """A matrix has a row and a column of second moments, a bias one each; in step t the rate is at most 1 / sqrt(t)."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    optimizer = Adafactor(learning_rate=0.8, weight_decay=0.05, eps=(1e-15, 1e-3), d=1.0).build(layer, fused=True)
    weight, bias = (value.detach().double().numpy().copy() for value in (layer.weight, layer.bias))
    row, column, plain = np.zeros((3, 1)), np.zeros((1, 5)), np.zeros(3)
    draw = np.random.default_rng(0)
    for step in (1, 2, 3):
        gradients = draw.normal(size=(3, 5)) * 3.0, draw.normal(size=3)
        layer.weight.grad, layer.bias.grad = (torch.tensor(each, dtype=torch.float32) for each in gradients)
        new = step**-0.8
        row += new * ((gradients[0] ** 2).mean(axis=1, keepdims=True) - row)
        column += new * ((gradients[0] ** 2).mean(axis=0, keepdims=True) - column)
        plain += new * (gradients[1] ** 2 - plain)
        for name, gradient, moment in (
            ("weight", gradients[0], row @ column / row.mean()),
            ("bias", gradients[1], plain),
        ):
            value = weight if name == "weight" else bias
            rate = max(1e-3, rms(value)) * min(0.8, 1 / np.sqrt(step))
            update = gradient / np.sqrt(moment)
            if name == "weight":
                value *= 1 - 0.8 * 0.05
            value -= rate * update / max(1.0, rms(update))
        optimizer.step()
    np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(layer.bias.detach().numpy(), bias, rtol=2e-5, atol=1e-6)


def test_it_needs_whole_tensors() -> None:
    assert not Adafactor.elementwise and Adafactor.tensorwise
    optimizer = Adafactor().build(nn.Linear(64, 32, bias=False), fused=False)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(32, 64)
    optimizer.step()
    (state,) = optimizer.state.values()
    assert sorted((key, tuple(value.shape)) for key, value in state.items()) == [
        ("col_var", (1, 64)), ("row_var", (32, 1)), ("step", ()),
    ]  # fmt: skip


def test_on_a_gpu_tensors_of_one_shape_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers in stacks of two weights, with one weight that has no gradient and one of three dimensions."""
    monkeypatch.setattr(without_waiting, "MOST_AT_ONCE", 2 * 15)
    torch.manual_seed(0)
    layers = [nn.Sequential(*(nn.Linear(5, 3) for _ in range(5)), nn.Conv1d(2, 3, 4)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours, plain = (Adafactor(learning_rate=0.8, weight_decay=0.05).build(layer, fused=True) for layer in layers)
    ours.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    pairs = list(zip(layers[0].parameters(), layers[1].parameters(), strict=True))
    for _ in range(3):
        for mine, theirs in pairs[1:]:
            theirs.grad = torch.randn_like(theirs) * 3.0
            mine.grad = theirs.grad.clone()
        ours.step()
        plain.step()
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in pairs[1:]:
        for key in ("step", *({"row_var", "col_var"} if mine.ndim > 1 else {"variance"})):
            torch.testing.assert_close(ours.state[mine][key], plain.state[theirs][key], rtol=1e-5, atol=1e-7)

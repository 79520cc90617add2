"""StableAdamW against the published formulas in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from terakoya_plugins.optimizers.adamw import AdamW
from terakoya_plugins.optimizers.stable_adamw import StableAdamW, clipped


def gradient(draw: np.random.Generator, shape: tuple[int, ...], step: int) -> np.ndarray:
    """Gradients that grow by 20 at step 30; every second one is below eps."""
    values = draw.normal(size=shape) * (20.0 if step >= 30 else 1.0)
    return values * np.where(np.arange(values.size).reshape(shape) % 2, 1e-5, 1.0)


@pytest.mark.parametrize("most", [1, 1 << 26])
def test_follows_the_published_algorithm_for_50_steps(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 2 of the paper, whose moments are corrected by their decay rates."""
    monkeypatch.setattr(clipped, "MOST_AT_ONCE", most)
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    optimizer = StableAdamW(learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-4).build(layer, fused=True)
    values = {name: value.detach().double().numpy().copy() for name, value in layer.named_parameters()}
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    draw, clipped_steps = np.random.default_rng(0), set()
    for step in range(1, 51):
        rate = 0.01 / step**0.5
        for group in optimizer.param_groups:
            group["lr"] = rate  # as the training loop sets the scheduled rate
        beta1, beta2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in (0.9, 0.98))
        for name, parameter in layer.named_parameters():
            each = gradient(draw, values[name].shape, step)
            parameter.grad = torch.tensor(each, dtype=torch.float32)
            each = parameter.grad.double().numpy()
            first[name] = beta1 * first[name] + (1 - beta1) * each
            second[name] = beta2 * second[name] + (1 - beta2) * each**2
            rms = np.sqrt(np.mean(each**2 / np.maximum(second[name], 1e-4**2)))
            own = rate / max(1.0, rms)
            clipped_steps |= {step} if rms > 1.5 else set()
            decay = 0.1 if name == "weight" else 0.0
            values[name] -= own * decay * values[name] + own * first[name] / (np.sqrt(second[name]) + 1e-4)
        optimizer.step()
        for name, parameter in layer.named_parameters():
            np.testing.assert_allclose(parameter.detach().numpy(), values[name], rtol=2e-5, atol=2e-6)
    assert min(clipped_steps) == 30, "where gradients grow"


def test_without_larger_gradients_it_is_adamw() -> None:
    """Of gradients with one size the root mean square is 1, so nothing is clipped. The state has AdamW's names."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Linear(4, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours, plain = (
        kind(learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6).build(layer, fused=True)
        for kind, layer in zip((StableAdamW, AdamW), layers, strict=True)
    )
    for _ in range(5):
        for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            mine.grad = torch.randn_like(mine).sign()
            theirs.grad = mine.grad.clone()
        ours.step()
        plain.step()
    for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
        assert ours.state[mine].keys() == plain.state[theirs].keys()


def test_it_needs_whole_tensors() -> None:
    assert not StableAdamW.elementwise and StableAdamW.tensorwise, "a shard has another root mean square"

"""Steps that a GPU skips without waiting for it: the same updates as on a CPU, and not a bit of a skipped one."""

from typing import Any

import pytest
import torch
from torch import nn

from terakoya.plugins import registry

SETTINGS: dict[str, dict[str, Any]] = {
    "adafactor": {"learning_rate": 0.8, "weight_decay": 0.05},
    "lion": {"learning_rate": 0.01, "weight_decay": 0.5},
    "stable_adamw": {"learning_rate": 0.01},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_step_of_a_gpu_is_that_of_a_cpu_and_can_be_skipped_to_the_bit(name: str) -> None:
    """The first step is skipped, too: its number is 0 then."""
    if name == "lion":
        pytest.importorskip("lion_pytorch", reason='needs `pip install "terakoya[lion]"`')
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3), nn.Linear(5, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    settings = registry().component("optimizers", name)(**SETTINGS[name])
    ours, plain = (settings.build(layer, fused=True) for layer in layers)
    pairs = list(zip(layers[0].parameters(), layers[1].parameters(), strict=True))
    for bad in (1.0, 0.0, 1.0, 0.0, 0.0):
        for mine, theirs in pairs:
            theirs.grad = torch.randn_like(theirs) * 3.0
            mine.grad = torch.full_like(mine, float("nan")) if bad else theirs.grad.clone()
        before = [mine.detach().clone() for mine, _ in pairs]
        state = [{key: value.clone() for key, value in each.items()} for each in ours.state.values()]
        ours.found_inf = torch.tensor(bad)
        ours.step()
        if bad:
            assert all(torch.equal(mine, was) for (mine, _), was in zip(pairs, before, strict=True))
            for was, now in zip(state, ours.state.values(), strict=False):
                assert all(torch.equal(was[key], now[key]) for key in was)
            continue
        plain.step()
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ours.state.values(), plain.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1e-5, atol=1e-7)

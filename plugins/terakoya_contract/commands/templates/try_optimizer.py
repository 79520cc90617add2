"""The optimizer `example` meets the requirements of its kind, and takes the expected step."""

from pathlib import Path

import torch
from terakoya import plugins
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_an_optimizer() -> None:
    assert problems(PLUGIN) == []


def test_its_first_step_is_the_gradient_times_the_learning_rate() -> None:
    settings = plugins.load([str(PLUGIN)]).component("optimizers", "example")(learning_rate=0.5)
    module = torch.nn.Linear(1, 1, bias=False)
    before = module.weight.item()
    optimizer = settings.build(module, fused=False)
    module(torch.ones(1)).sum().backward()
    optimizer.step()
    assert abs(module.weight.item() - (before - 0.5)) < 1e-6

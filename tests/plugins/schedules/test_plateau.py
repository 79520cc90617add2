"""The plateau schedule: torch's ReduceLROnPlateau, loss for loss."""

import random
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from terakoya.components import Progress
from terakoya_plugins.schedules.plateau import Plateau


@pytest.mark.parametrize(
    "settings",
    [
        {"patience": 0},
        {"patience": 2, "threshold": 0.05},
        {"patience": 1, "threshold": 0.1, "threshold_mode": "abs", "cooldown": 3},
        {"patience": 0, "min_lr": 0.003, "eps": 0.0},
        {"patience": 0, "cooldown": 1, "eps": 0.001},
    ],
)
def test_it_equals_torchs(settings: dict[str, Any]) -> None:
    generator = random.Random(5)
    losses = [3.0 * 0.97**each + generator.uniform(-0.3, 0.3) for each in range(80)] + [float("nan"), 0.1]
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    theirs = ReduceLROnPlateau(optimizer, factor=0.5, **settings)
    ours, seen, rates = Plateau(decay_factor=0.5, **settings), [], set()
    for number, loss in enumerate(losses):
        theirs.step(loss)
        seen.append((10 * number, loss))
        progress = Progress(step=10 * number + 3, max_steps=999, learning_rate=0.1, validation=tuple(seen))
        assert 0.1 * ours.factor(progress) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        rates.add(optimizer.param_groups[0]["lr"])
    assert len(rates) > 2, "the losses lower it more than once"


def test_it_warms_up_first() -> None:
    schedule = Plateau(warmup_steps=4, patience=0)
    course = [schedule.factor(Progress(step=step, max_steps=9, validation=((0, 2.0),))) for step in range(6)]
    assert course == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    worse = ((0, 2.0), (1, 3.0))
    assert schedule.factor(Progress(step=0, max_steps=9, validation=worse)) == pytest.approx(0.1)
    assert schedule.needs_validation

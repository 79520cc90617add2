"""The polynomial schedule, compared with Transformers'."""

import pytest
from torch import nn
from torch.optim import SGD
from transformers import get_polynomial_decay_schedule_with_warmup

from terakoya.components import Progress
from terakoya_plugins.schedules.polynomial import Polynomial


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_it_equals_transformers(power: float) -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    theirs = get_polynomial_decay_schedule_with_warmup(optimizer, 4, 20, lr_end=0.01, power=power)
    schedule = Polynomial(warmup_steps=4, min_lr=0.01, power=power)
    for step in range(30):
        if step >= 4:
            ours = 0.1 * schedule.factor(Progress(step=step, max_steps=20, learning_rate=0.1))
            assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        theirs.step()


def test_known_values() -> None:
    course = [Polynomial(power=2.0).factor(Progress(step=step, max_steps=4)) for step in range(6)]
    assert course == [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]

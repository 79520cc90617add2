"""The inverse square root schedule, compared with Transformers'."""

import math

import pytest
from torch import nn
from torch.optim import SGD
from transformers import get_inverse_sqrt_schedule

from terakoya.components import Progress
from terakoya_plugins.schedules.inverse_square_root import InverseSquareRoot


@pytest.mark.parametrize(("warmup", "timescale"), [(5, None), (5, 20), (0, None)])
def test_it_equals_transformers(warmup: int, timescale: int | None) -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = get_inverse_sqrt_schedule(optimizer, warmup, timescale)
    schedule = InverseSquareRoot(warmup_steps=warmup, timescale=timescale)
    for step in range(60):
        if step >= warmup:
            assert schedule.factor(Progress(step=step, max_steps=10)) == pytest.approx(theirs.get_last_lr()[0]), step
        optimizer.step()
        theirs.step()


def test_known_values_in_tokens() -> None:
    schedule = InverseSquareRoot(warmup_tokens=1000, min_lr=0.25)
    known = {0: 0.1, 900: 1.0, 1000: 1.0, 4000: 0.5, 9000: 1 / 3, 16_000: 0.25, 90_000: 0.25}
    for tokens, expected in known.items():
        progress = Progress(step=tokens // 100, tokens=tokens, max_steps=100, max_tokens=10_000)
        assert schedule.factor(progress) == pytest.approx(expected), tokens
    own = InverseSquareRoot(warmup_steps=10, timescale_tokens=3000)  # from the 1,000 tokens of 10 expected steps on
    progress = Progress(step=40, tokens=4000, max_steps=100, max_tokens=10_000)
    assert own.factor(progress) == pytest.approx(math.sqrt(3000 / 6000))

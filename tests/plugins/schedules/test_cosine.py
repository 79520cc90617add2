"""The cosine schedule: Megatron-LM's formula, and Transformers' values where both agree."""

import math

import pytest
from torch import nn
from torch.optim import SGD
from transformers import get_cosine_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup

from terakoya.components import Progress
from terakoya.errors import UserError
from terakoya_plugins.schedules.cosine import Cosine

PEAK, FLOOR = 3e-4, 3e-5


def megatron(step: int, *, warmup: int, decay: int) -> float:
    """The learning rate of Megatron-LM's OptimizerParamScheduler after `step` steps, style cosine."""
    if step <= warmup:
        return PEAK * step / warmup
    if step > decay:
        return FLOOR
    ratio = (step - warmup) / (decay - warmup)
    return FLOOR + 0.5 * (math.cos(math.pi * ratio) + 1.0) * (PEAK - FLOOR)


def test_it_equals_megatrons_and_stays_at_min_lr() -> None:
    """Megatron's step 0 has a learning rate of 0 during warm-up, where terakoya's schedule is one step ahead."""
    schedule = Cosine(warmup_steps=10, lr_decay_steps=80, min_lr=FLOOR)
    for step in range(120):
        ours = PEAK * schedule.factor(Progress(step=step, max_steps=100, learning_rate=PEAK))
        theirs = megatron(step + 1 if step < 10 else step, warmup=10, decay=80)
        assert ours == pytest.approx(theirs, rel=1e-12), step
    half = schedule.factor(Progress(step=45, max_steps=100, learning_rate=PEAK))
    assert PEAK * half == pytest.approx((PEAK + FLOOR) / 2), "half-way from 10 to 80"


@pytest.mark.parametrize("floor", [0.0, FLOOR])
def test_it_equals_transformers_if_it_decays_to_the_end(floor: float) -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=PEAK)
    theirs = (
        get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, 40, min_lr=floor)
        if floor
        else get_cosine_schedule_with_warmup(optimizer, 5, 40)
    )
    schedule = Cosine(warmup_steps=5, min_lr=floor)
    for step in range(40):
        if step >= 5:
            ours = PEAK * schedule.factor(Progress(step=step, max_steps=40, learning_rate=PEAK))
            assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9), step
        optimizer.step()
        theirs.step()


def test_a_floor_above_the_peak_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule.min_lr: expected at most optimizer.learning_rate, 0.0003, got 0.1"):
        Cosine(min_lr=0.1).check(Progress(step=0, max_steps=10, learning_rate=PEAK))
    Cosine(min_lr=PEAK).check(Progress(step=0, max_steps=10, learning_rate=PEAK))

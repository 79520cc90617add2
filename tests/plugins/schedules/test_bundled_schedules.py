"""The bundled schedules beside Transformers', torch's and Megatron-LM's."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from terakoya.components import Progress
from terakoya.errors import UserError
from terakoya_plugins.schedules.constant import Constant
from terakoya_plugins.schedules.cosine import Cosine
from terakoya_plugins.schedules.exponential import Exponential
from terakoya_plugins.schedules.inverse_square_root import InverseSquareRoot
from terakoya_plugins.schedules.linear import Linear
from terakoya_plugins.schedules.plateau import Plateau
from terakoya_plugins.schedules.polynomial import Polynomial
from terakoya_plugins.schedules.warmup_stable_decay import WarmupStableDecay

# ------------------------------------------------------------------------------------------------------------ constant


def test_it_warms_up_and_stays() -> None:
    assert Constant().factor(Progress(step=0, max_steps=4)) == 1.0
    course = [Constant(warmup_steps=2).factor(Progress(step=step, max_steps=9)) for step in (0, 1, 2, 8, 90)]
    assert course == [0.5, 1.0, 1.0, 1.0, 1.0]


# -------------------------------------------------------------------------------------------------------------- linear


def factor(schedule: Linear, step: int, max_steps: int) -> float:
    return schedule.factor(Progress(step=step, max_steps=max_steps))


def test_values_at_the_corners() -> None:
    schedule = Linear(warmup_steps=10)
    course = [factor(schedule, step, 110) for step in range(111)]
    assert course[0] == 0.1 and course[9] == 1.0 and course[10] == 1.0
    assert course[60] == 0.5 and course[110] == 0.0
    assert max(course) == 1.0 and min(course) == 0.0


def test_it_is_transformers_schedule_one_warm_up_step_ahead() -> None:
    """Transformers' first step has a learning rate of 0 and no effect; terakoya starts at 1 / warmup_steps."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=20)
    ours = Linear(warmup_steps=5)
    for step in range(20):
        if step < 5:
            assert factor(ours, step, 20) == (step + 1) / 5
        else:
            assert abs(factor(ours, step, 20) - theirs.get_last_lr()[0]) < 1e-12
        optimizer.step()
        theirs.step()


def test_without_warm_up() -> None:
    assert factor(Linear(), 0, 4) == 1.0


def test_the_original_electra_warms_up_while_it_decays() -> None:
    """The decay starts at the first step and is multiplied by the warm-up; one step ahead, as above."""
    schedule = Linear(warmup_steps=10, simultaneous=True)
    course = [factor(schedule, step, 100) for step in range(101)]
    assert course[0] == 0.1 and course[4] == 0.96 * 0.5 and course[9] == 0.91
    assert course[50] == 0.5 and course[100] == 0.0
    assert factor(Linear(simultaneous=True), 25, 100) == 0.75
    with pytest.raises(ValidationError, match="simultaneous: needs warmup_steps"):
        Linear(simultaneous=True, warmup_tokens=5)


def test_it_ends_at_min_lr() -> None:
    schedule = Linear(warmup_steps=2, min_lr=2e-5, lr_decay_steps=12)
    course = [schedule.factor(Progress(step=step, max_steps=20, learning_rate=1e-4)) for step in range(20)]
    assert course[:2] == [0.5, 1.0], "warm-up starts at 0, as in Megatron"
    assert course[7] == pytest.approx(0.6) and course[12] == pytest.approx(0.2)
    assert course[12:] == [course[12]] * 8, "constant"


# -------------------------------------------------------------------------------------------------------------- cosine

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


# ---------------------------------------------------------------------------------------------------------- polynomial


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


# --------------------------------------------------------------------------------------------------------- exponential


def test_each_step_has_the_same_ratio_to_the_one_before() -> None:
    schedule = Exponential(warmup_steps=2, decay_rate=0.01)
    course = [schedule.factor(Progress(step=step, max_steps=22)) for step in range(30)]
    assert course[:3] == [0.5, 1.0, 1.0]
    ratios = [after / before for before, after in itertools.pairwise(course[2:23])]
    assert ratios == pytest.approx([0.01 ** (1 / 20)] * 20)
    assert course[12] == pytest.approx(0.1) and course[22:] == pytest.approx([0.01] * 8)


def test_it_stops_at_min_lr() -> None:
    schedule = Exponential(decay_rate=0.01, min_lr=0.002)
    course = [schedule.factor(Progress(step=step, max_steps=10, learning_rate=0.01)) for step in range(11)]
    assert course[3] == pytest.approx(0.01**0.3) and course[4:] == pytest.approx([0.2] * 7)


# ------------------------------------------------------------------------------------------------- inverse square root


@pytest.mark.parametrize(("warmup", "timescale"), [(5, None), (5, 20), (0, None)])
def test_inverse_square_root_it_equals_transformers(warmup: int, timescale: int | None) -> None:
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


# ------------------------------------------------------------------------------------------------------------- plateau


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


# ------------------------------------------------------------------------------------------------- warmup stable decay


@pytest.mark.parametrize("floor", [0.0, 0.01])
@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_warmup_stable_decay_it_equals_transformers(shape: str, floor: float) -> None:
    """It is one step ahead during warm-up, which starts at 0 for any min_lr."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    theirs = get_wsd_schedule(
        optimizer, num_warmup_steps=6, num_decay_steps=10, num_training_steps=40, warmup_type=shape, decay_type=shape,
        min_lr_ratio=floor / 0.1,
    )  # fmt: skip
    course = []
    for _ in range(50):
        course.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    schedule = WarmupStableDecay(warmup_steps=6, decay_steps=10, warmup_type=shape, decay_type=shape, min_lr=floor)
    ours = [0.1 * schedule.factor(Progress(step=step, max_steps=40, learning_rate=0.1)) for step in range(50)]
    assert ours[6:] == pytest.approx(course[6:], rel=1e-9)
    if not floor:
        assert ours[:6] == pytest.approx(course[1:7], rel=1e-9)


def test_the_decay_ends_at_lr_decay_steps_and_takes_a_tenth_by_default() -> None:
    early = WarmupStableDecay(lr_decay_steps=20, decay_ratio=0.25, decay_type="linear")
    course = [early.factor(Progress(step=step, max_steps=40)) for step in range(40)]
    assert course[10] == 1.0 and course[15] == 0.5 and course[20:] == [0.0] * 20
    plain = [WarmupStableDecay(decay_type="linear").factor(Progress(step=step, max_steps=40)) for step in range(41)]
    assert plain[36:] == [1.0, 0.75, 0.5, 0.25, 0.0] and set(plain[:36]) == {1.0}


@pytest.mark.parametrize("given", [{"decay_steps": 90}, {"decay_ratio": 1.0}])
def test_a_decay_longer_than_the_rest_of_the_run_begins_where_warm_up_ends(given: dict[str, float]) -> None:
    schedule = WarmupStableDecay(warmup_steps=10, decay_type="linear", **given)
    course = [schedule.factor(Progress(step=step, max_steps=50)) for step in range(51)]
    assert course[:11] == pytest.approx([step / 10 for step in range(1, 11)] + [1.0])
    assert course[10:] == pytest.approx([1.0 - done / 40 for done in range(41)])


def test_only_one_length_of_the_decay_is_accepted() -> None:
    with pytest.raises(ValidationError, match="at most one of decay_steps, decay_tokens, decay_ratio, got decay_steps"):
        WarmupStableDecay(decay_steps=3, decay_tokens=4)


@pytest.mark.parametrize("given", [{"decay_steps": 0}, {"decay_ratio": 0.0, "warmup_steps": 3}, {"decay_tokens": 0}])
def test_a_decay_of_no_length_is_none_also_over_what_a_run_records(given: dict[str, float]) -> None:
    recorded = WarmupStableDecay(warmup_steps=3).model_dump()
    for schedule in (WarmupStableDecay(**given), WarmupStableDecay(**recorded | given)):
        assert {schedule.factor(Progress(step=step, max_steps=40)) for step in range(3, 40)} == {1.0}
        assert WarmupStableDecay(**schedule.model_dump()) == schedule

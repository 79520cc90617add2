"""The exponential schedule: the same ratio from step to step."""

import itertools

import pytest

from terakoya.components import Progress
from terakoya_plugins.schedules.exponential import Exponential


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

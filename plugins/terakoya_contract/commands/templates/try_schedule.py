"""The schedule `example` meets the requirements of its kind, and has the expected first and last values."""

from pathlib import Path

import pytest
from terakoya import plugins
from terakoya.components import Progress
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_meets_the_requirements_of_a_schedule() -> None:
    assert problems(PLUGIN) == []


def test_it_rises_to_the_peak_and_falls_to_its_floor() -> None:
    schedule = plugins.load([str(PLUGIN)]).component("schedules", "example")(warmup_steps=4, floor=0.2)
    factors = [schedule.factor(Progress(step=step, max_steps=100)) for step in range(101)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[-1] == pytest.approx(0.2) and factors[4:] == sorted(factors[4:], reverse=True)

"""The schedule `example` keeps its promises, and begins and ends where it should."""

from pathlib import Path

import pytest
from terakoya import contract, plugins
from terakoya.components import Progress

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))


def test_it_keeps_what_a_schedule_promises() -> None:
    assert contract.problems(PLUGIN) == []


def test_it_rises_to_the_peak_and_falls_to_its_floor() -> None:
    schedule = plugins.load([str(PLUGIN)]).component("schedules", "example")(warmup_steps=4, floor=0.2)
    course = [schedule.factor(Progress(step=step, max_steps=100)) for step in range(101)]
    assert course[:4] == [0.25, 0.5, 0.75, 1.0]
    assert course[-1] == pytest.approx(0.2) and course[4:] == sorted(course[4:], reverse=True)

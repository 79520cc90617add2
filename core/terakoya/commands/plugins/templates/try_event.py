"""The event plugin `example` meets the requirements of its kind, and counts what it should."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from terakoya import contract, plugins

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))
RUN: Any = SimpleNamespace(step=3, reduce=dict)


def test_it_meets_the_requirements_of_an_event_plugin() -> None:
    assert contract.problems(PLUGIN) == []


def test_slow_steps_are_counted_also_after_a_resume() -> None:
    settings = plugins.load([str(PLUGIN)]).component("events", "example")(slow_seconds=1.0)
    before, after = settings.start(RUN), settings.start(RUN)
    for seconds in (0.5, 2.0):
        before.step_finished(RUN, SimpleNamespace(seconds=seconds))
    after.load(before.state())
    assert after.evaluate(RUN) == {"slow_steps": 1.0}

"""The event plugin `example` meets the requirements of its kind, and counts what it should."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from terakoya import plugins
from terakoya_contract import problems

PLUGIN = Path(__file__).with_name(Path(__file__).name.removeprefix("test_"))
RANKS: list[Any] = [SimpleNamespace(step=3, rank=rank, reduce=dict) for rank in range(2)]  # each reduces to its own


def test_it_meets_the_requirements_of_an_event_plugin() -> None:
    assert problems(PLUGIN) == []


def test_slow_steps_are_counted_also_after_a_resume_with_more_ranks() -> None:
    settings = plugins.load([str(PLUGIN)]).component("events", "example")(slow_seconds=1.0)
    before, after = settings.start(RANKS[0]), [settings.start(run) for run in RANKS]
    for seconds in (0.5, 2.0):
        before.step_finished(RANKS[0], SimpleNamespace(seconds=seconds))
    for each in after:
        each.load(before.state())
    assert sum(each.evaluate(run)["slow_steps"] for each, run in zip(after, RANKS, strict=True)) == 1.0

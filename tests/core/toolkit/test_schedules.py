"""Warm-up and decay by steps, by tokens and by shares of the run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from terakoya.components import Progress
from terakoya.errors import UserError
from terakoya.plugins import load
from terakoya.toolkit.schedules import DecaySchedule, WarmupSchedule


class Line(DecaySchedule):
    """A linear decay."""

    def factor(self, progress: Progress) -> float:
        """As linear."""
        warming = self.warmup_factor(progress)
        return self.decay_span(progress).remaining if warming is None else warming


def by_tokens(tokens: int, *, step: int = 0, **changes: Any) -> Progress:
    """The progress before a step of a run of 10,000 tokens, about 100 steps."""
    return Progress(
        **{"step": step, "max_steps": 100, "tokens": tokens, "max_tokens": 10_000, "unit": "tokens"} | changes
    )


def test_in_tokens_steps_do_not_count() -> None:
    schedule = Line(warmup_tokens=1000)
    where = {0: 0.1, 450: 0.55, 900: 1.0, 999: 1.0, 1000: 1.0, 5500: 0.5, 9100: 0.1, 10_000: 0.0, 10_090: 0.0}
    for tokens, expected in where.items():
        for step in (0, 7, 300):
            assert schedule.factor(by_tokens(tokens, step=step)) == pytest.approx(expected), (tokens, step)


def test_a_run_in_steps_may_warm_up_and_decay_by_tokens() -> None:
    schedule = Line(warmup_tokens=1000, lr_decay_tokens=5000)
    assert schedule.factor(by_tokens(3000, step=99, unit="steps")) == pytest.approx(0.5)
    assert schedule.factor(by_tokens(5001, step=50, unit="steps")) == 0.0


def test_a_run_in_tokens_may_warm_up_by_steps_and_ends_by_tokens() -> None:
    """The ten steps and the end are exact; the start of the decay follows from the expected size of a step."""
    schedule = Line(warmup_steps=10)
    assert [schedule.factor(by_tokens(100 * step, step=step)) for step in (0, 9)] == [0.1, 1.0]
    assert schedule.factor(by_tokens(850, step=10)) == 1.0, "steps were smaller than expected: not above the peak"
    assert schedule.factor(by_tokens(5500, step=60)) == pytest.approx(0.5)
    assert schedule.factor(by_tokens(10_000, step=80)) == 0.0


def test_a_share_of_the_run_is_in_the_unit_of_its_length() -> None:
    ratio = Line(warmup_ratio=0.1)
    assert ratio.warmup(by_tokens(0)) == ("tokens", 1000)
    assert ratio.warmup(Progress(step=0, max_steps=95)) == ("steps", 10), "rounded up, as Transformers does"
    assert ratio.factor(Progress(step=4, max_steps=95)) == 0.5


def test_each_length_has_one_setting() -> None:
    with pytest.raises(ValidationError, match="at most one of warmup_steps, warmup_tokens, warmup_ratio, got warmup_t"):
        Line(warmup_tokens=3, warmup_ratio=0.1)
    with pytest.raises(ValidationError, match="at most one of lr_decay_steps, lr_decay_tokens, got lr_decay_steps and"):
        Line(lr_decay_steps=3, lr_decay_tokens=4)


def test_an_end_within_the_warm_up_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule.lr_decay_steps: expected more than the 10 steps of warm-up, got 8"):
        Line(warmup_steps=10, lr_decay_steps=8).check(Progress(step=0, max_steps=100))
    with pytest.raises(UserError, match=r"schedule.lr_decay_tokens: expected more than the 1,000 tokens of warm-up"):
        Line(warmup_steps=10, lr_decay_tokens=900).check(by_tokens(0))
    Line(warmup_steps=10).check(Progress(step=0, max_steps=5))  # a short run with a long warm-up is allowed


SCHEDULES = {
    registered.name: registered.component
    for registered in load().components()
    if registered.kind == "schedules" and registered.name != "plateau"
}


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.sampled_from([{}, {"warmup_steps": 7}, {"warmup_tokens": 900}, {"warmup_ratio": 0.2}]),
    end=st.sampled_from([{}, {"lr_decay_steps": 60}, {"lr_decay_tokens": 6000}]),
    sizes=st.lists(st.integers(1, 250), min_size=5, max_size=120),
    unit=st.sampled_from(["steps", "tokens"]),
)
def test_every_schedule_rises_once_then_falls_to_its_floor(
    name: str, warmup: dict[str, Any], end: dict[str, Any], sizes: list[int], unit: str
) -> None:
    """For all sizes of steps: above 0, at most the peak, no rise after a fall, the floor at the end."""
    component = SCHEDULES[name]
    known = component.model_fields
    floor = {"min_lr": 0.05} if "min_lr" in known else {}
    schedule = component(**warmup, **(end if "lr_decay_steps" in known else {}), **floor)
    tokens, course = 0, []
    for step, size in enumerate(sizes):
        course.append(schedule.factor(by_tokens(tokens, step=step, unit=unit)))
        tokens += size
    assert min(course) > 0 and max(course) <= 1.0
    top = course.index(max(course))
    assert course[: top + 1] == sorted(course[: top + 1])
    assert all(after <= before + 1e-12 for before, after in zip(course[top:], course[top + 1 :], strict=False))
    last = schedule.factor(by_tokens(100_000, step=1000, unit=unit))
    if issubclass(component, DecaySchedule) and name != "exponential":
        assert last == pytest.approx(0.05)
    assert issubclass(component, WarmupSchedule)

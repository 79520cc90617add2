"""The warmup-stable-decay schedule: Transformers' shapes, and Megatron-LM's end of the decay."""

import pytest
from pydantic import ValidationError
from torch import nn
from torch.optim import SGD
from transformers import get_wsd_schedule

from terakoya.components import Progress
from terakoya_plugins.schedules.warmup_stable_decay import WarmupStableDecay


@pytest.mark.parametrize("floor", [0.0, 0.01])
@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_it_equals_transformers(shape: str, floor: float) -> None:
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


@pytest.mark.parametrize("given", [{}, {"decay_steps": 5}, {"decay_ratio": 0.5}])
def test_an_older_record_in_which_0_is_no_length_means_what_it_meant(given: dict[str, float]) -> None:
    recorded = {"decay_steps": 0, "decay_tokens": 0, "decay_ratio": 0.0} | given
    assert WarmupStableDecay(**recorded) == WarmupStableDecay(**given)
    longer = WarmupStableDecay(**recorded | {"decay_steps": 7, "decay_ratio": 0.0})
    assert longer == WarmupStableDecay(decay_steps=7)

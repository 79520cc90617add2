"""The linear schedule at its corners, compared with Transformers' and the original ELECTRA's."""

import pytest
from pydantic import ValidationError
from torch import nn
from torch.optim import SGD
from transformers import get_linear_schedule_with_warmup

from terakoya.components import Progress
from terakoya_plugins.schedules.linear import Linear


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

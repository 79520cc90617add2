"""The learning rate's course at its corners."""

from torch import nn
from torch.optim import SGD
from transformers import get_linear_schedule_with_warmup

from terakoya_plugins.schedules.linear import Constant, Linear


def test_linear_meets_its_corners() -> None:
    schedule = Linear(warmup_steps=10)
    course = [schedule.factor(step, max_steps=110) for step in range(111)]
    assert course[0] == 0.1 and course[9] == 1.0 and course[10] == 1.0
    assert course[60] == 0.5 and course[110] == 0.0
    assert max(course) == 1.0 and min(course) == 0.0


def test_linear_is_transformers_schedule_one_warm_up_step_ahead() -> None:
    """Transformers' first step has a learning rate of 0 and so does nothing; ours starts at 1 / warmup_steps."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=20)
    ours = Linear(warmup_steps=5)
    for step in range(20):
        if step < 5:
            assert ours.factor(step, max_steps=20) == (step + 1) / 5
        else:
            assert abs(ours.factor(step, max_steps=20) - theirs.get_last_lr()[0]) < 1e-12
        optimizer.step()
        theirs.step()


def test_without_warm_up() -> None:
    assert Linear().factor(0, max_steps=4) == 1.0
    assert Constant().factor(0, max_steps=4) == 1.0
    assert [Constant(warmup_steps=2).factor(step, max_steps=9) for step in (0, 1, 8)] == [0.5, 1.0, 1.0]


def test_the_original_electra_warms_up_while_it_decays() -> None:
    """Its decay runs from the first step and its warm-up is multiplied with it; one step ahead, as above."""
    schedule = Linear(warmup_steps=10, simultaneous=True)
    course = [schedule.factor(step, max_steps=100) for step in range(101)]
    assert course[0] == 0.1 and course[4] == 0.96 * 0.5 and course[9] == 0.91
    assert course[50] == 0.5 and course[100] == 0.0
    assert Linear(simultaneous=True).factor(25, max_steps=100) == 0.75

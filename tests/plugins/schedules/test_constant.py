"""The schedule that warms up and stays constant."""

from terakoya.components import Progress
from terakoya_plugins.schedules.constant import Constant


def test_it_warms_up_and_stays() -> None:
    assert Constant().factor(Progress(step=0, max_steps=4)) == 1.0
    course = [Constant(warmup_steps=2).factor(Progress(step=step, max_steps=9)) for step in (0, 1, 2, 8, 90)]
    assert course == [0.5, 1.0, 1.0, 1.0, 1.0]

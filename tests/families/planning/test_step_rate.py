"""The parts of a step are timed apart: micro-steps, the update, a validation's forward."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.parameters import Parameters
from terakoya.distributed.context import connect
from terakoya.distributed.topology import LaunchInfo
from terakoya.rows.stores import Stores
from terakoya.training.run_log import RunLog
from terakoya.training.setup import build_trainer
from terakoya_planning.step_rate import LEAST_STEPS, StepRate, time_steps


class Clock:
    """A clock that moves only while the engine works."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def slow_down(self, engine: Any, name: str, seconds: tuple[float, float]) -> None:
        """Makes the method `name` take so many seconds of this clock: the second number in a step's last micro-step."""
        work = getattr(engine, name)

        def slow(*given: Any, **named: Any) -> Any:
            self.seconds += seconds[bool(named.get("last"))]
            return work(*given, **named)

        setattr(engine, name, slow)


@pytest.mark.slow
def test_the_medians_of_the_parts_of_a_step(store: Path, tmp_path: Path) -> None:
    raw = toy.parameters(store, batch_size={"-1": 6}, micro_batch_size=2, max_steps=100)
    parameters = Parameters.from_dict(raw, source="test")
    context, clock = connect(LaunchInfo.from_environment(node_rank=None)), Clock()
    with closing(RunLog(tmp_path, (), {}, active=False)) as run_log:
        trainer = build_trainer(parameters, tmp_path, Stores.open(parameters.data), context, run_log)
        engine = trainer.engine
        clock.slow_down(engine, "micro_step", (2.0, 5.0))
        clock.slow_down(engine, "step", (1.0, 1.0))
        clock.slow_down(engine, "evaluate", (0.5, 0.5))
        rate = time_steps(trainer, seconds=0.0, now=clock)
        assert rate == StepRate(2.0, 1.0 + 3.0, 0.5), "the last micro-step also reduces gradients, once a step"
        assert rate.step(3) == 2 + 2 + 5 + 1 and trainer.run.step == LEAST_STEPS
        time_steps(trainer, seconds=95.0, now=clock)
        assert trainer.run.step == LEAST_STEPS + 10
        time_steps(trainer, seconds=1e9, most=2, now=clock)
        assert trainer.run.step == LEAST_STEPS + 12 and trainer.engine is engine

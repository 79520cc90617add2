"""Runs in this process that end where a signal would kill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from terakoya.config.parameters import Parameters
from terakoya.training import setup
from terakoya.training.trainer import Trainer


class Killed(Exception):
    """Ends a run where a signal would kill it."""


def train(
    settings: Mapping[str, Any],
    out: Path,
    spoil: Callable[[Any], None] = lambda run: None,
    *,
    kill: int | None = None,
    kill_in_step: int | None = None,
) -> int:
    """Trains, after `spoil` has seen the run, and returns the number of updates; dies within update `kill` of this
    start, or within the step `kill_in_step`."""
    taken = 0

    def build(*arguments: Any, **options: Any) -> Trainer:
        trainer = build_trainer(*arguments, **options)
        spoil(trainer.run)
        engine: Any = trainer.engine
        take = engine.step

        def take_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == kill or trainer.run.step + 1 == kill_in_step:
                raise Killed
            return take(*arguments, **options)

        engine.step = take_or_die
        return trainer

    build_trainer = setup.build_trainer
    with mock.patch.object(setup, "build_trainer", build):
        setup.train_in_this_process(Parameters.from_dict(settings, source="test"), out)
    return taken

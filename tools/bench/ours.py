"""Our side: a whole run as `terakoya train` makes it, timed step by step by a plugin."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from step_clock import Clock
from turns import Step, Turn

from terakoya import plugins
from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process
from terakoya.training.start.meeting import Advice, StartOptions, no_advice

PLUGIN = Path(__file__).with_name("step_clock.py")


def train(_: int, raw: Mapping[str, Any], *, steps: int, warm_up: int = 1) -> Turn:
    """Trains with the parameters `raw` for `warm_up` + `steps` steps; the facts hold the loss of each logged step."""
    clock = Clock(warm_up=warm_up, steps=steps)
    tokens, losses = run(raw, warm_up + steps, clock)
    timed = zip(tokens[warm_up:], clock.differences(), strict=True)
    return Turn([Step(count, *seconds) for count, seconds in timed], losses)


class StepClock(Protocol):
    """What is told of each step."""

    def step_ended(self) -> None:
        """Notes that a step has ended."""


def clock_plugin() -> ModuleType:
    """Returns the plugin that tells the clock."""
    return next(each.module for each in plugins.load([str(PLUGIN)]).plugins if each.module.__file__ == str(PLUGIN))


def run(
    raw: Mapping[str, Any], steps: int, clock: StepClock, folder: Path | None = None, *, advice: Advice = no_advice
) -> tuple[list[int], dict[str, float]]:
    """Trains in `folder`, which all processes share; where None, in one of its own that is removed afterwards. `clock`
    is told of each step, and `advice` may add to errors. Returns the steps' real tokens, and `loss N` of each logged
    step N, counted from 0."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what is compared is a core; with a GPU the host only feeds it
    plugin = clock_plugin()
    plugin.clock = clock
    plugin.tokens.clear()
    plugin.losses.clear()
    parameters = Parameters.from_dict({**raw, "max_steps": steps}, source="bench")
    with contextlib.ExitStack() as held:
        where = folder or Path(held.enter_context(tempfile.TemporaryDirectory()))
        held.enter_context(contextlib.redirect_stderr(StringIO()))  # its live line
        train_in_this_process(parameters, where, StartOptions(advice=advice))
    return list(plugin.tokens), dict(plugin.losses)

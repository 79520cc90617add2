"""Our side: a whole run as `terakoya train` makes it, timed step by step by a plugin."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from turns import Step, Turn

from terakoya import plugins
from terakoya.parameters import Parameters
from terakoya.training.setup import train_here

CLOCK = Path(__file__).with_name("step_clock.py")


def train(_: int, raw: Mapping[str, Any], *, steps: int, warm_up: int = 1) -> Turn:
    """Trains with the parameters `raw` for `warm_up` + `steps` steps in a folder that is removed afterwards."""
    torch.set_num_threads(1)
    registry = plugins.load([str(CLOCK)])
    clock = next(each.module for each in registry.plugins if each.module.__file__ == str(CLOCK))
    clock.start(warm_up=warm_up, steps=steps)
    parameters = Parameters.from_dict({**raw, "max_steps": warm_up + steps}, source="bench")
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):  # its live line
        train_here(parameters, Path(folder))
    timed = zip(clock.tokens[warm_up:], clock.clock.differences(), strict=True)
    return Turn([Step(tokens, *seconds) for tokens, seconds in timed], {})

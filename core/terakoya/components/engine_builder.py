"""What builds the engine of a run in a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineBuilder:
    """Builds an engine, and says of which runs; `from terakoya.components import EngineBuilder`.

    Attributes:
        build: takes a `training.engines.inputs.EngineInputs`, returns a `training.engines.engine.Engine`.
        defers: whether its processes hold parts of the module alone, so that none need build all weights: they are in
            `EngineInputs.deferred`.
    """

    build: Callable[[Any], Any]
    defers: bool = True

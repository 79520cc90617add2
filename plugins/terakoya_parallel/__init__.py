"""One model in many processes: fully sharded, tensor, pipeline, sequence and context parallelism on plain torch, and
DeepSpeed's ZeRO; see docs/design/engines.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.training.engines.engine import Engine
    from terakoya.training.engines.inputs import EngineInputs


@hookimpl
def register_engines() -> Mapping[str, Callable[[EngineInputs], Engine]]:
    """Implements `hookspecs.register_engines`."""
    return {"ddp": _build, "fsdp": _build, "deepspeed": _build_deepspeed}


def _build(inputs: EngineInputs) -> Engine:
    from terakoya_parallel.engine import ParallelEngine

    return ParallelEngine(inputs)


def _build_deepspeed(inputs: EngineInputs) -> Engine:
    from terakoya_parallel.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(inputs)

"""One model in many processes: fully sharded, tensor, pipeline, sequence and context parallelism on plain torch, and
DeepSpeed's ZeRO; see docs/design/engines.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.config.fields import ParameterFields
    from terakoya.training.engines.engine import Engine
    from terakoya.training.engines.inputs import EngineInputs


@hookimpl
def register_engines() -> Mapping[str, Callable[[EngineInputs], Engine]]:
    """Implements `hookspecs.register_engines`."""
    return {"ddp": _Parallel(), "fsdp": _Parallel(), "deepspeed": _build_deepspeed}


class _Parallel:
    """The engine, and what it cannot do together with other settings."""

    def __call__(self, inputs: EngineInputs) -> Engine:
        from terakoya_parallel.engine import ParallelEngine

        return ParallelEngine(inputs)

    def find_conflicts(self, parameters: ParameterFields) -> Iterator[str]:
        from terakoya_parallel.conflicts import find_problems

        return find_problems(parameters)


def _build_deepspeed(inputs: EngineInputs) -> Engine:
    from terakoya_parallel.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(inputs)

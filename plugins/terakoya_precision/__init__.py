"""Mixed precision beyond torch's autocast: the bf16 stream with its fused kernels, and products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from terakoya.components import Copies, ModuleBuild, ModuleTransform
    from terakoya.config.fields import ParameterFields


@hookimpl
def register_module_transforms() -> Mapping[str, ModuleTransform]:
    """Implements `hookspecs.register_module_transforms`."""
    from terakoya.components import ModuleTransform

    return {
        "bf16_stream": ModuleTransform("engine", uses_bf16_stream, _stream),
        "fp8": ModuleTransform(
            "precision", lambda parameters: parameters.precision == "fp8", _convert, _find_conflicts, _check
        ),
    }


def uses_bf16_stream(parameters: ParameterFields) -> bool:
    """Whether a run of `parameters` takes the bf16 stream, with any number of processes, and not autocast: each process
    has whole weights, or gathers them for each use."""
    parallel = parameters.parallel
    return (
        parameters.precision == "bf16"
        and not parameters.autocast
        and parallel.engine in ("ddp", "fsdp")
        and parallel.replica_size == 1
        and all(each.bf16_stream for each in parameters.objective.architectures(parameters.architecture))
    )


def _stream(module: nn.Module, build: ModuleBuild) -> Copies:
    from terakoya_precision.bf16_stream import WeightCopies
    from terakoya_precision.fused import choice

    fused, reason = choice.choose(module, build.context, setting=build.parameters.fused_kernels)
    if reason is not None:
        build.warn(f"fused kernels off: {reason}")
    device = build.context.device if build.gathers else None
    return WeightCopies(module, fused=fused, gathers_on=device, compiled=build.compiled != "off")


def _convert(module: nn.Module, build: ModuleBuild) -> None:
    from terakoya_precision import fp8

    fp8.convert(module)


def _find_conflicts(parameters: ParameterFields) -> Iterable[str]:
    from terakoya_precision import fp8

    return fp8.find_conflicts(parameters)


def _check(device: torch.device) -> None:
    from terakoya_precision import fp8

    fp8.check(device)

"""Less memory of the device: activations that are computed again or wait on the host, and frozen weights of 8 and 4
bits under adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from terakoya.components import ModuleBuild, ModuleTransform
    from terakoya.config.fields import ParameterFields


@hookimpl
def register_module_transforms() -> Mapping[str, ModuleTransform]:
    """Implements `hookspecs.register_module_transforms`."""
    from terakoya.components import ModuleTransform

    return {
        "activation_checkpointing": ModuleTransform(
            "freeze", lambda parameters: parameters.activation_checkpointing is not None, _recompute
        ),
        "activation_offloading": ModuleTransform(
            "compile", lambda parameters: parameters.activation_offloading, _offload, _find_offloading_conflicts
        ),
        "quantization": ModuleTransform(
            "adapt", lambda parameters: parameters.lora is not None and parameters.lora.quantization is not None,
            _pack, _find_packing_conflicts,
        ),
    }  # fmt: skip


def _recompute(module: nn.Module, build: ModuleBuild) -> None:
    from terakoya_memory.activation_checkpointing import apply_activation_checkpointing

    kind = build.parameters.activation_checkpointing
    apply_activation_checkpointing(module, build.architectures, build.vocabulary, kind)


def _offload(module: nn.Module, build: ModuleBuild) -> None:
    from terakoya_memory.host_activations import offload

    offload(module, build)


def _pack(module: nn.Module, build: ModuleBuild) -> None:
    from terakoya_memory.packed_weights import pack_frozen

    pack_frozen(module, build.parameters.lora.quantization)


def _find_offloading_conflicts(parameters: ParameterFields) -> Iterator[str]:
    if parameters.parallel.pp_size > 1:
        yield (
            f"activation_offloading: with parallel.pp_size {parameters.parallel.pp_size} each stage keeps the "
            'activations of its micro-batches; use "activation_checkpointing": "full", or set it to false'
        )


def _find_packing_conflicts(parameters: ParameterFields) -> Iterator[str]:
    parallel = parameters.parallel
    if parallel.engine != "ddp" or parallel.replica_size > 1:
        yield (
            "lora.quantization: packed weights are not divided: each process holds the model, got "
            f'"{parallel.describe()}"; use "engine": "ddp" and no division inside of a replica, or set it to null'
        )

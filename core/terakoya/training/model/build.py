"""Builds the root module that a run trains from its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from terakoya.components import ModuleBuild
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters, missing_base_error
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.cpu_allocator import returning_freed_memory
from terakoya.errors import UserError
from terakoya.toolkit.deferred_tensors import CannotDeferError, DeferredTensors
from terakoya.toolkit.random_keys import torch_seed
from terakoya.training.model import mup
from terakoya.training.model.start_from import LoadedWeights, load_on_rank0_and_broadcast
from terakoya.training.model.transforms import transform


def build_module(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """Returns the root module of `parameters`, with weights randomly initialised from the seed alone."""
    parameters.objective.check(vocabulary, sequence_length=parameters.data.sequence_length)
    torch.manual_seed(torch_seed(parameters.seed, "weights"))
    module = parameters.objective.build(parameters.architecture, vocabulary)
    mup.scale_initial_values(module, mup.find_scales(parameters, module, vocabulary))
    return module


def build_module_for_training(parameters: Parameters, vocabulary: Vocabulary) -> nn.Module:
    """Returns the module of `build_module` after the transforms of the stage `freeze`.
    Raises as `build_module`, and where layers cannot be frozen or recomputed."""
    module = build_module(parameters, vocabulary)
    transform("freeze", module, ModuleBuild(parameters, vocabulary))
    return module


@dataclass(frozen=True)
class InitialModule:
    """The module with which a run begins.

    Attributes:
        module: the root module, after the transforms of the stage `adapt`.
        parameter_count: the number of its parameters before these.
        started: what was read from `start_from`, into the module of rank 0; None where nothing was.
        deferred: has the weights, and `module` has no memory for them; None where it has.
        obstacle: why it has, where it should not.
    """

    module: nn.Module
    parameter_count: int
    started: LoadedWeights | None
    deferred: DeferredTensors | None = None
    obstacle: str | None = None


@returning_freed_memory()
def build_initial(
    parameters: Parameters,
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    context: DistributedContext,
    *,
    fresh: bool,
    in_parts: bool,
) -> InitialModule:
    """Builds the module with which a run begins, with the weights of `start_from` in rank 0; collective. A run that
    goes on, and is not `fresh`, needs only the weights that stay as they are. Raises as `build_module_for_training`, or
    `start_from` does not fit.

    Where each process holds the module `in_parts`, none has memory for all weights: they are deferred. Code of plugins
    that needs weights at once gets them, in every process.
    """
    build = partial(_build_initial, parameters, vocabulary, tokenizer_folder, context, fresh)
    if not in_parts:
        return build(None)
    deferred, obstacle = DeferredTensors(), None
    try:
        with deferred:
            built = build(deferred)
        _finish(built.module, deferred)
    except Exception as error:  # noqa: BLE001 - whatever code raises that expects values; errors come again below
        obstacle = f"{type(error).__name__}: {error}"
    obstacles = [each for each in context.gather(obstacle) if each is not None]
    return replace(build(None), obstacle=obstacles[0]) if obstacles else replace(built, deferred=deferred)


def _build_initial(
    parameters: Parameters,
    vocabulary: Vocabulary,
    tokenizer_folder: Path,
    context: DistributedContext,
    fresh: bool,
    deferred: DeferredTensors | None,
) -> InitialModule:
    module = build_module_for_training(parameters, vocabulary)
    started = None
    if parameters.start_from is not None and (fresh or parameters.trained_beside):
        try:
            started = load_on_rank0_and_broadcast(parameters, module, vocabulary, tokenizer_folder, context, deferred)
        except UserError as error:
            raise (error if fresh else missing_base_error(error)) from error
    parameter_count = sum(parameter.numel() for parameter in module.parameters())
    transform("adapt", module, ModuleBuild(parameters, vocabulary, context))
    return InitialModule(module, parameter_count, started)


def _finish(module: nn.Module, deferred: DeferredTensors) -> None:
    """Gives the buffers of `module` their values; parameters stay without them. Raises CannotDeferError if nothing has
    set a parameter."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if deferred.is_deferred(buffer):
                part._buffers[name] = deferred.value(buffer)
    for name, value in module.named_parameters():
        if value.is_meta and not deferred.is_written(value):
            raise CannotDeferError(f"nothing sets {name}")

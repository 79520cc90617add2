"""The weights that an engine of parts begins with: each process receives its own parts of those of rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.tensor_shards import TensorPart
from terakoya.training.model.deferred import DeferredTensors
from terakoya.training.model.module_parts import named_values


class InitialWeights:
    """The parameters and buffers of a root module before an engine takes parts of it.

    With `deferred` no process has memory for the module's parameters. They pass through all processes one at a time,
    each of which keeps its part.

    Attributes:
        values: name -> parameter or buffer of the root module, whose value is rank 0's.
    """

    def __init__(self, module: nn.Module, deferred: DeferredTensors | None, context: DistributedContext) -> None:
        self.deferred = deferred
        self.context = context
        values = dict(named_values(module)) | dict(module.named_buffers())
        self.values = {name: value.detach() for name, value in values.items()}  # `fill` changes the module's own

    def deferring(self) -> AbstractContextManager[object]:
        """Returns a context in which values that are computed from the weights are deferred as they are."""
        return contextlib.nullcontext() if self.deferred is None else self.deferred

    def value(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`, which was made from the weights of this process, with its values."""
        return tensor if self.deferred is None else self.deferred.value(tensor)

    @torch.no_grad()
    def fill(self, module: nn.Module, names: Mapping[str, str], parts: Mapping[str, TensorPart]) -> None:
        """Sets all that `module`, this process's part of the root module, holds of the values; collective.

        Args:
            names: name in `module` -> name in the root module.
            parts: name in the root module -> where the values that `module` holds are in the whole tensor.
        """
        for parameter in module.parameters():
            if parameter.is_meta:
                memory = torch.empty_like(parameter, device=self.context.device)
                torch.utils.swap_tensors(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
        own = {names.get(each, each): value for each, value in named_values(module)}
        for name, value in self.values.items():
            whole = self._receive(value)
            if name in own:
                held = own[name]
                (held.to_local() if isinstance(held, DTensor) else held).copy_(parts[name].cut(whole))

    def _receive(self, value: Tensor) -> Tensor:
        """Returns rank 0's `value`, which all processes have memory for or none, on the device; collective."""
        if not value.is_meta:
            whole = value
        elif self.context.is_main:
            whole = self.value(value)
        else:
            whole = torch.empty_like(value, device=self.context.device)
        on_device = whole.to(self.context.device)
        torch.distributed.broadcast(on_device, src=0)
        if not value.is_meta and on_device is not whole:
            whole.copy_(on_device)  # stages share buffers that no checkpoint holds
        return on_device

"""The weights that an engine of parts begins with: each process receives its own parts of those of rank 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terakoya.distributed.context import DistributedContext
from terakoya.toolkit.deferred_tensors import DeferredTensors
from terakoya.training.model.module_parts import named_values
from terakoya.training.step_health import wait_for_device
from terakoya_parallel.fsdp_groups import local_values
from terakoya_parallel.tensor_part import TensorPart


class InitialWeights:
    """The parameters and buffers of a root module before an engine takes parts of it.

    With `deferred` no process has memory for the module's parameters. They pass through all processes one at a time,
    each of which keeps its part.

    Attributes:
        values: name -> parameter or persistent buffer of the root module, whose value is rank 0's.
    """

    def __init__(self, module: nn.Module, deferred: DeferredTensors | None, context: DistributedContext) -> None:
        """Gives all other buffers of `module` the values of rank 0; collective."""
        self.deferred = deferred
        self.context = context
        self.values = {name: value.detach() for name, value in named_values(module)}  # `fill` changes the module's own
        for name, value in module.named_buffers():
            if name not in self.values:
                self._receive(value)

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
        own = {names[each]: value for each, value in named_values(module)}
        for name, value in self.values.items():
            whole = self._receive(value)
            if name in own:
                local_values(own[name]).copy_(parts[name].cut(whole))

    def _receive(self, value: Tensor) -> Tensor:
        """Returns rank 0's `value` on the device, and sets it where it is not deferred; collective."""
        if not value.is_meta:
            whole = value.detach()
        elif self.context.is_main:
            assert self.deferred is not None, "nothing else is without values"
            whole = self.deferred.value(value)
        else:
            whole = torch.empty_like(value, device=self.context.device)
        on_device = whole.to(self.context.device).contiguous()
        dist.broadcast(on_device, src=0)
        if on_device.is_cuda:
            # NCCL counts the time of a broadcast from its beginning here, and rank 0 may be many weights behind
            (arrived := torch.cuda.Event()).record()
            wait_for_device(arrived)
        if not value.is_meta and on_device is not whole:
            whole.copy_(on_device)
        return on_device

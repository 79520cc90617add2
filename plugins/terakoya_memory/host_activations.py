"""Activations on the host: large tensors that the backward needs leave the device in the forward, and come back when it
asks for them.

torch's own `save_on_cpu` copies each saved tensor, packed anew. Here a tensor's whole memory is copied, once for all
tensors that share it (queries, keys and values of one product), and comes back with its strides: operations of the
backward read what they would have read, so every number has the same bits. The device keeps weights, copies of weights
in 16 bits, and what is small. Of blocks that are computed again it is their inputs that wait on the host.

Copies follow each other on the stream that computes, to pinned memory, for which the host does not wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from terakoya.components import ModuleBuild
from terakoya_memory.activation_checkpointing import storage_of

MIN_BYTES = 1 << 16
"""Smaller memory stays on the device: copies of it take longer to start than to move."""
OF_WEIGHTS = frozenset({"TBackward0", "ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"})
"""torch's names for the gradients of views of weights, and of autocast's copies."""
LEAF = "torch::autograd::AccumulateGrad"
"""torch's name for the gradient of a tensor that is trained."""


def offload(module: nn.Module, build: ModuleBuild) -> None:
    """Has `module`, as it is called by the engine, keep its activations on the host."""
    if build.context is not None and build.context.device.type == "cpu":
        build.warn(
            "activation_offloading: on a CPU activations are copied from the host to the host, which saves nothing"
        )
    module.forward = update_wrapper(_OnHost(module, build), module.forward)


@dataclass(frozen=True)
class _Waiting:
    """A tensor on the host.

    Attributes:
        memory: all elements of its memory, (n,); other tensors may share it.
    """

    memory: Tensor
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def bring_back(self) -> Tensor:
        """Returns the tensor on its device, in memory of its own."""
        memory = torch.empty_like(self.memory, device=self.device, pin_memory=False)
        memory.copy_(self.memory, non_blocking=True)
        return memory.as_strided(self.size, self.stride, self.start)


class _OnHost:
    """The forward of a module whose activations wait on the host.

    Attributes:
        staying: the addresses of memory that outlives a step: of weights, their copies, and buffers.
        copied: what this forward has copied, by address, version and type, as long as the tensor lives.
    """

    def __init__(self, module: nn.Module, build: ModuleBuild) -> None:
        self.module, self.forward = module, module.forward
        self.on_host = build.on_host
        self.staying: frozenset[int] | None = None
        self.copied: dict[tuple[int, int, torch.dtype], tuple[weakref.ref[Any], Tensor]] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*arguments, **named)
        if self.staying is None:
            self.staying = frozenset(storage_of(each) for each in _lasting_tensors(self.module))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return self.forward(*arguments, **named)
        finally:
            self.copied.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Waiting:
        """Returns what autograd keeps of `tensor`."""
        storage = tensor.untyped_storage() if not is_traceable_wrapper_subclass(tensor) else None
        if storage is None or storage.nbytes() < MIN_BYTES or self._stays(tensor):
            # a result that kept itself would never be freed
            return tensor if tensor.grad_fn is None else tensor.detach()
        key = (storage._cdata, tensor._version, tensor.dtype)
        found = self.copied.get(key)
        if found is None or found[0]() is None:
            with self.on_host():
                elements = (storage.nbytes() // tensor.element_size(),)
                pinned = tensor.device.type == "cuda"
                memory = torch.empty(elements, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
                memory.copy_(tensor.detach().as_strided(elements, (1,), 0), non_blocking=True)
            found = self.copied[key] = (weakref.ref(storage), memory)
        return _Waiting(found[1], tensor.device, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _stays(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a weight, or made of one: it is there anyway."""
        assert self.staying is not None
        if (
            storage_of(tensor) in self.staying
            or isinstance(tensor, nn.Parameter)
            or isinstance(tensor._base, nn.Parameter)
        ):
            return True
        node = tensor.grad_fn
        while node is not None and node.name() in OF_WEIGHTS:
            node = node.next_functions[0][0]
        return node is not None and node.name() == LEAF


def _unpack(kept: Tensor | _Waiting) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.bring_back()


def _lasting_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors that parts of `module` hold: parameters, buffers, and those in their attributes."""
    for part in module.modules():
        for value in vars(part).values():
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            yield from (each for each in inside if isinstance(each, Tensor) and not is_traceable_wrapper_subclass(each))

"""Where hidden states enter and leave a part of a model in which processes hold something else of them.

Letters in shapes: B rows, T positions, t of them on each process, H hidden size, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from terakoya_parallel import fp8_scales

Change = Callable[[Tensor], Tensor]
"""What is done to hidden states, or to their gradient, at a border."""
REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch's reduce-scatter of one tensor, by its name from torch 2.13 on, and before."""


def all_gather(part: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the `part` of each process of `group`, one after another along `axis`, in memory of their own."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)


def reduce_scatter(values: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """Returns this process's part along `axis` of the sum of all processes' `values`."""
    parts = values.chunk(dist.get_world_size(group), axis)
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    REDUCE_SCATTER(own, torch.cat(parts), group=group)  # the compiler traces no list of parts
    return own


def multiply(layer: nn.Module, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the product of `hidden` and the weight of `layer`, an `nn.Linear` or Conv1D, plus `bias`."""
    return F.linear(hidden, _matrix(layer), bias)


def _matrix(layer: Any) -> Tensor:
    """The weight of `layer`, (outputs, inputs)."""
    weight: Tensor = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


class Border:
    """The border of a part of a model.

    Attributes:
        inward: what is done to hidden states that enter, and to the gradient of those that leave.
        outward: what is done to hidden states that leave, and to the gradient of those that enter.
    """

    def __init__(self, inward: Change, outward: Change) -> None:
        self.inward = inward
        self.outward = outward

    def enter(self, hidden: Tensor) -> Tensor:
        """Returns `hidden` inside."""
        inside: Tensor = _Cross.apply(hidden, self.inward, self.outward)
        return inside

    def leave(self, hidden: Tensor) -> Tensor:
        """Returns `hidden` outside."""
        outside: Tensor = _Cross.apply(hidden, self.outward, self.inward)
        return outside


class GatheredBorder(Border):
    """The border of parallel regions, one after another, that all-gather positions and reduce-scatter them.

    Linear layers that read what was gathered keep this process's positions of it, and gather them again in the
    backward, once for all layers of a region (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2). In a graph of
    the compiler, layers are as usual and the gather is what the backward computes again, once.

    Attributes:
        gathered: in a region's forward or backward, what entered it, (B, t, H), and all positions of it, (B, T, H),
            held together so that nothing else gets the memory of the first.
    """

    def __init__(self, gather: Change, scatter: Change) -> None:
        super().__init__(gather, self._scatter)
        self.scatter = scatter
        self.gathered: tuple[Tensor, Tensor] | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """Returns all positions (B, T, H) of `hidden` (B, t, H)."""
        if torch.compiler.is_compiling():
            inside: Tensor = checkpoint(super().enter, hidden, use_reentrant=False)
            return inside
        inside = super().enter(hidden)
        self.gathered = hidden.detach(), inside.detach()
        return inside

    def gather_again(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns all positions (B, T, H) of `own` (B, t, H), which entered a region, as `dtype`."""
        if self.gathered is None or not _share_memory(self.gathered[0], own) or self.gathered[1].dtype != dtype:
            self.gathered = own, self.inward(own.to(dtype))
        return self.gathered[1]

    def keep_own_input(self, layer: nn.Module) -> None:
        """Makes `layer`, an `nn.Linear` or Conv1D within, keep only this process's positions of what it reads. One that
        multiplies in 8 bits is compiled, and stays as it is."""
        if fp8_scales.multiplies(layer):
            return
        layer.__dict__["border"] = self
        layer.__dict__["forward"] = MethodType(_multiply_gathered, layer)  # a method: blocks share their graphs

    def _scatter(self, values: Tensor) -> Tensor:
        """Ends a region's forward, or its backward."""
        if not torch.compiler.is_compiling():
            self.gathered = None
        return self.scatter(values)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether both are the same values. Addresses are those of storages, which tensors without data have, too."""
    return first.shape == second.shape and first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _multiply_gathered(layer: Any, hidden: Tensor) -> Tensor:
    """Returns the outputs (B, T, N) of `layer`, of a region with a `border`, for `hidden` (B, T, H)."""
    own, whole = layer.border.gathered or (None, None)
    if whole is None or not _share_memory(whole, hidden):
        return multiply(layer, hidden, layer.bias)  # the layer reads something that was computed within
    outputs: Tensor = _GatheredLinear.apply(hidden, own, _matrix(layer), layer.bias, layer.border)
    return outputs


class _Cross(torch.autograd.Function):
    """Does `there` to hidden states and `back` to their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.back(gradients[0]), None, None


class _GatheredLinear(torch.autograd.Function):
    """A linear layer that keeps `own` (B, t, H), this process's positions of `hidden` (B, T, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, border: GatheredBorder
    ) -> Tensor:
        ctx.border = border
        ctx.save_for_backward(own, weight)
        return F.linear(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        needs_hidden, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        whole = ctx.border.gather_again(own, gradient.dtype).flatten(0, -2) if needs_weight else None
        return (
            gradient @ weight.to(gradient.dtype) if needs_hidden else None,
            None,
            None if whole is None else rows.T @ whole,
            rows.sum(0) if needs_bias else None,
            None,
        )

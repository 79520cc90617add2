"""Whole tensors for an optimizer that needs them, where each process holds shards of every tensor.

Each tensor has an owner, which keeps the tensor's state, whole. Before an optimizer's step, processes send their shards
of gradients and weights to the owners; the optimizer then updates whole tensors; after it, owners send the updated
weights back. Nothing is computed on the way, so weights have the bits that a process with all tensors would give them
from the same gradients. Tensors are divided by size, so that processes own, compute and send about equally much.

An engine builds a `WholeTensors` over what it holds, and the rest happens in hooks of `torch.optim.Optimizer.step`,
which every process of the group must call equally often. See docs/design/engines.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terakoya.training.engines.engine import SavedTensors
from terakoya.training.engines.tensor_shards import TensorShard, assign_owners, whole_shard

Place = tuple[int | tuple[int, ...], tuple[int, ...]]
"""Where a shard is in its tensor, as `TensorShard.start`, and the shard's shape."""


@dataclass(frozen=True)
class Holding:
    """What this process holds of one tensor.

    Attributes:
        held: what the optimizer's groups contain: the shards, among others perhaps.
        shape: the whole tensor's shape.
        shards: returns the shards that are in a tensor laid out like `held`, in the same memory.
    """

    held: Tensor
    shape: tuple[int, ...]
    shards: Callable[[Tensor], Iterable[TensorShard]]


class WholeTensors:
    """The tensors that an optimizer sees whole. Without `holdings` there are none, and nothing happens.

    Attributes:
        owners: name -> the process of `group` that owns the tensor.
        owned: name -> this process's tensors as the optimizer sees them; they have elements during a step only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        holdings: Mapping[str, Holding],
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        state: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Collective within `group`.

        Args:
            holdings: the tensors, by names that are the same on all processes.
            state: the whole state that the optimizer has of them before its first step.
        """
        self.optimizer = optimizer
        self.holdings = dict(sorted(holdings.items()))
        self.group = group
        self.device = device
        self.owners: dict[str, int] = {}
        self.owned: dict[str, nn.Parameter] = {}
        if not holdings:
            return
        self.index, size = dist.get_rank(group), dist.get_world_size(group)
        self.owners = assign_owners({name: each.shape for name, each in self.holdings.items()}, size)
        self.owned = {name: self._placeholder() for name in self.holdings if self.owners[name] == self.index}
        mine = {
            name: [(shard.start, tuple(shard.value.shape)) for shard in each.shards(each.held) if shard.value.numel()]
            for name, each in self.holdings.items()
        }
        self.places: list[dict[str, list[Place]]] = [{} for _ in range(size)]
        dist.all_gather_object(self.places, mine, group=group)
        self.copied = {name for name in self.holdings if all(each[name] == mine[name] for each in self.places)}
        """The tensors that every process holds whole."""
        fused = {id(each) for group in optimizer.param_groups if group.get("fused") for each in group["params"]}
        self.fused = {name for name, each in self.holdings.items() if id(each.held) in fused}
        for name, values in (state or {}).items():
            if name in self.owned:
                optimizer.state[self.owned[name]] = {
                    key: value.to(device, copy=True) if value.ndim else value for key, value in values.items()
                }
        self.depth = 0
        self.in_step: list[str] = []
        self.params_before: list[tuple[dict[str, Any], list[Tensor]]] = []
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def __contains__(self, name: object) -> bool:
        return name in self.owners

    def _placeholder(self) -> nn.Parameter:
        """A parameter without elements, under which the optimizer keeps the state of a tensor from step to step."""
        return nn.Parameter(torch.empty(0, device=self.device))

    # ------------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Gives the optimizer the whole tensors that this process owns, of those whose shards it is about to update."""
        self.depth += 1
        if self.depth > 1:  # a step that calls its base class's, which has hooks of its own
            return
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        names = [name for name, each in self.holdings.items() if id(each.held) in held and each.held.grad is not None]
        gradients = self._send_to_owners(names, lambda each: each.grad)
        weights = self._send_to_owners(names, lambda each: each)
        for name, weight in weights.items():
            self.owned[name].data, self.owned[name].grad = weight, gradients[name]
        ours = {id(each.held) for each in self.holdings.values()}
        for group in optimizer.param_groups:
            inside = {id(each) for each in group["params"]}
            whole = [self.owned[name] for name in weights if id(self.holdings[name].held) in inside]
            self.params_before.append((group, group["params"]))
            group["params"] = [each for each in group["params"] if id(each) not in ours] + whole
        self.in_step = names

    @torch.no_grad()
    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Distributes the updated tensors."""
        self.depth -= 1
        if self.depth:
            return
        for group, params in self.params_before:
            group["params"] = params
        for name in self.in_step:
            if name in self.owned:
                self.owned[name].grad = None
        self._send_back(self.in_step)
        for name in self.in_step:
            if name in self.owned:
                self.owned[name].data = torch.empty(0, device=self.device)
        self.in_step, self.params_before = [], []

    def _send_to_owners(self, names: Sequence[str], of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
        """Returns the whole tensors among `names` that this process owns, made of what `of` returns of each `held`."""
        outgoing: list[list[Tensor]] = [[] for _ in self.places]
        for name in names:
            owner, values = self.owners[name], of(self.holdings[name].held)
            assert values is not None, f"{name} has a gradient"
            if name not in self.copied or owner == self.index:
                outgoing[owner] += self._flat_shards(name, values)
        mine = [name for name in names if name in self.owned]
        sources = [
            [name for name in mine if name not in self.copied or process == self.index]
            for process in range(len(self.places))
        ]
        received = self._exchange(outgoing, [self._elements(process, some) for process, some in enumerate(sources)])
        whole = {name: torch.empty(self.holdings[name].shape, device=self.device) for name in mine}
        for process, some in enumerate(sources):
            for name in some:
                for box in self._boxes(process, name, whole[name]):
                    box.copy_(next(received).view_as(box))
        return whole

    def _send_back(self, names: Sequence[str]) -> None:
        """Sets the shards of `names` to their places in the whole tensors of their owners."""
        mine = [name for name in names if name in self.owned]
        outgoing = [
            [box.reshape(-1) for name in mine for box in self._boxes(process, name, self.owned[name].data)]
            for process in range(len(self.places))
        ]
        of_owner = [[name for name in names if self.owners[name] == process] for process in range(len(self.places))]
        received = self._exchange(outgoing, [self._elements(self.index, some) for some in of_owner])
        for some in of_owner:
            for name in some:
                holding = self.holdings[name]
                for shard in holding.shards(holding.held):
                    if shard.value.numel():
                        shard.value.copy_(next(received).view_as(shard.value))

    def _exchange(self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Sends the flat tensors `outgoing[i]` to process i; yields those that arrive, which have `incoming[i]`
        elements from process i."""
        nothing = torch.empty(0, device=self.device)
        sent = torch.cat([nothing, *(each for some in outgoing for each in some)])
        sizes_sent = [sum(each.numel() for each in some) for some in outgoing]
        sizes = [sum(some) for some in incoming]
        received = torch.empty(sum(sizes), device=self.device)
        dist.all_to_all_single(received, sent, sizes, sizes_sent, group=self.group)
        return iter(received.split([size for some in incoming for size in some]))

    def _flat_shards(self, name: str, values: Tensor) -> list[Tensor]:
        shards = self.holdings[name].shards(values)
        return [shard.value.reshape(-1) for shard in shards if shard.value.numel()]

    def _elements(self, process: int, names: Sequence[str]) -> list[int]:
        """The elements of each shard of `names` that `process` holds."""
        return [math.prod(shape) for name in names for _, shape in self.places[process][name]]

    def _boxes(self, process: int, name: str, whole: Tensor) -> Iterator[Tensor]:
        """Yields the parts of `whole` that `process` holds of the tensor `name`, as views."""
        for start, shape in self.places[process][name]:
            if isinstance(start, int):
                yield whole.view(-1).narrow(0, start, shape[0])
            else:
                yield whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]

    # ------------------------------------------------------------------------------------------------- checkpoints

    def state_shards(self) -> Iterator[TensorShard]:
        """Yields the state of the tensors that this process owns, as `parameter_name/state_name`."""
        for name, tensor in self.owned.items():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                yield whole_shard(f"{name}/{key}", value)

    def load_state(self, values: SavedTensors, names: frozenset[str]) -> None:
        """Sets that state from `values(name)` for those of `names` that are of tensors that this process owns."""
        for each in sorted(names):
            name, _, key = each.rpartition("/")
            if name in self.owned:
                # step counts are on the host, unless the optimizer's kernels are fused
                device = self.device if key != "step" or name in self.fused else "cpu"
                self.optimizer.state[self.owned[name]][key] = values(each).to(device, copy=True)

"""torch's `fully_shard` (FSDP2; Zhao et al., 2023, arXiv:2304.11277) as an `Engine`.

Each process holds some rows of every weight, of its gradient and of its optimizer state. Each block of each model is a
group, and everything else (embeddings, heads, weights that several modules share) is one more group. A block's weights
are all-gathered for its forward and again for its backward, and freed after each; those of the last group stay gathered
in between. Gradients are reduce-scattered in every micro-step's backward. Of a weight with n rows the first process
holds the first ceil(n / processes), and so on: the last processes may hold fewer, or none. The engine needs an
architecture that defines the blocks, and weights that are not scalars.

With `dp_shard_size` groups of processes, such as those of a node, share weights among themselves (hybrid sharding):
weights are gathered within a group, and the groups add up their gradients, once a step.

The optimizer sees rows as plain tensors, or whole tensors where it needs them (`whole_tensors`). Weights, gradients and
state are fp32. In bf16 and fp16 a block's matrices are gathered in 16 bits, to which autocast would cast them anyway,
and their gradients are summed in fp32: the numbers are those of DDP. Checkpoints hold tensors under the module's names:
a checkpoint of any engine or number of processes can be read by any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terakoya.components import Architecture, Optimizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parallel import Parallel
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn, SavedTensors
from terakoya.training.engines.fsdp_groups import create_mesh, shard_module
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.engines.whole_tensors import Holding, WholeTensors, whole_names
from terakoya.training.model.module_parts import saved_values


class FSDPEngine(DDPEngine):
    """An `Engine` whose module is sharded by `fully_shard`, over two or more processes.

    Attributes:
        groups: the modules whose weights are gathered together; the root module, with all other weights, is the last.
        mesh: the processes; its last dimension is those that share weights.
        sharded: name -> each trained parameter, a DTensor.
        shards: name -> this process's rows of it as a plain tensor, which the optimizer updates.
        whole: those that the optimizer sees whole.
    """

    full_module = False

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        optimizer: Optimizer,
        architectures: Sequence[Architecture],
        vocabulary: Vocabulary,
        *,
        parallel: Parallel,
        precision: str,
        max_grad_norm: float,
        scaler: LossScaler | None = None,
    ) -> None:
        """Shards `module` with the weights of rank 0.

        Raises:
            UserError: none of `architectures` defines a model's blocks, a weight cannot be sharded, or `dp_shard_size`
                does not divide the processes.
        """
        built = optimizer.build(module, fused=context.device.type in ("cpu", "cuda"))
        names = {id(value): name for name, value in module.named_parameters()}
        group_names = [[names[id(each)] for each in group["params"]] for group in built.param_groups]
        seen_whole = whole_names(optimizer, built.param_groups, names)
        initial_state = {names[id(each)]: state for each, state in built.state.items()}
        for group in built.param_groups:
            group["params"] = []  # a reference would keep the whole weight on the device
        built.state.clear()
        context.broadcast_module(module)
        self.mesh = create_mesh(context, parallel)
        self.groups = shard_module(module, architectures, vocabulary, self.mesh, precision=precision)
        super().__init__(context, module, built, precision=precision, max_grad_norm=max_grad_norm, scaler=scaler)
        self.sharded = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.shards = {name: nn.Parameter(_local(value)) for name, value in self.sharded.items()}
        for group, its_names in zip(built.param_groups, group_names, strict=True):
            group["params"] = [self.shards[name] for name in its_names]
        for name, state in initial_state.items():  # Adagrad, for one, has a state before its first step
            if name not in seen_whole:
                built.state[self.shards[name]] = {
                    key: value[slice(*self._rows(len(value)))].to(context.device, copy=True) if value.ndim else value
                    for key, value in state.items()
                }
        self.whole = WholeTensors(
            built,
            {name: self._holding(name) for name in seen_whole},
            self.mesh.get_group(self.mesh.ndim - 1),
            device=context.device,
            state=initial_state,
        )
        self.trainable = list(self.shards.values())

    def _holding(self, name: str) -> Holding:
        """This process's rows of the parameter `name`."""
        shape = tuple(self.sharded[name].shape)
        return Holding(self.shards[name], shape, lambda rows: [self._shard(name, rows, shape)])

    @property
    def replicas(self) -> int:
        """Number of groups of processes of which each holds all weights."""
        return self.mesh.size() // self.mesh.size(-1)

    @property
    def replica(self) -> int:
        """Index of this process's group."""
        return self.context.rank // self.mesh.size(-1)

    def gradient_group(self) -> None:
        """None: `fully_shard` sums gradients itself."""

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. Gradients are reduced in every micro-step: whole gradients, kept until the last micro-step,
        would take as much memory on each process as `fully_shard` saves. Replicas of the shards add theirs up once."""
        self.groups[-1].set_requires_all_reduce(last)
        sums = super().micro_step(batch, loss_fn, last=last)
        if last:
            for value, shard in zip(self.sharded.values(), self.trainable, strict=True):
                if value.grad is not None:
                    shard.grad, value.grad = _local(value.grad), None
        return sums

    def clip(self) -> Tensor:
        """See `DDPEngine`. The norm is that of all processes' rows, so that all clip, or skip a step, alike."""
        gradients = [shard.grad for shard in self.trainable if shard.grad is not None and shard.numel()]
        local = nn.utils.get_total_norm(gradients, foreach=True).to(self.context.device, torch.float64)
        norm = (self.context.sum_on_device(local.square()) / self.replicas).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    # --------------------------------------------------------------------------------------------- checkpoints

    def weight_shards(self) -> list[TensorShard]:
        """See `Engine`; of several replicas the first."""
        mine = self.sharded.items() if self.replica == 0 else ()
        shards = (self._shard(name, self.shards[name].detach(), tuple(value.shape)) for name, value in mine)
        return [shard for shard in shards if shard.value.numel()]

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Each process writes its own rows, without gathering; rows of several replicas, and replicated
        tensors, are divided."""
        rows = list(self.whole.state_shards()) if kind == "optimizer" else []
        replicated = []
        for name, value, shape in self._weights() if kind == "model" else self._state():
            if shape is None:
                replicated.append(whole_shard(name, value))
            elif value.numel():
                rows.append(self._shard(name, value, shape))
        yield from assign_shards(rows, self.replica, self.replicas)
        yield from assign_shards(replicated, self.context.rank, self.context.world_size)

    def _shard(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> TensorShard:
        """This process's `rows` of a tensor of that `shape`."""
        first, _ = self._rows(shape[0])
        return TensorShard(name, rows, shape, (first, *(0 for _ in shape[1:])))

    def _weights(self) -> Iterator[tuple[str, Tensor, tuple[int, ...] | None]]:
        """Yields, for each parameter and buffer of `saved_values`, its name, this process's values, and the whole
        tensor's shape if these are rows of it."""
        self.groups[-1].reshard()  # after a forward without a backward the root's weights are still gathered
        for name, value in saved_values(self.module):
            yield name, _local(value), tuple(value.shape) if isinstance(value, DTensor) else None

    def _state(self) -> Iterator[tuple[str, Tensor, tuple[int, ...] | None]]:
        """Yields the same for the optimizer's state, in which scalars are step counts."""
        for key, value in self.optimizer_state():
            yield key, value, tuple(self.sharded[key.rpartition("/")[0]].shape) if value.ndim else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this process's rows of each parameter that the optimizer updates as rows, with its name in the root
        module."""
        yield from ((name, value) for name, value in self.shards.items() if name not in self.whole)

    def load_parameters(self, values: SavedTensors) -> None:  # type: ignore[override] # needs `part`
        """See `Engine`. Each process reads its own rows."""
        for name, value, shape in self._weights():
            value.copy_(values(name) if shape is None else self._read(values, name))

    def load_optimizer_state(self, values: SavedTensors, names: frozenset[str]) -> None:  # type: ignore[override]
        """See `Engine`."""
        super().load_optimizer_state(lambda key: self._read(values, key) if values.shape(key) else values(key), names)
        self.whole.load_state(values, names)

    def _read(self, values: SavedTensors, name: str) -> Tensor:
        """Reads this process's rows of the tensor `name`."""
        length, *rest = values.shape(name)
        (first, last), width = self._rows(length), math.prod(rest)
        return values.part(name, first * width, (last - first) * width).view(last - first, *rest)

    def _rows(self, length: int) -> tuple[int, int]:
        """The rows [first, last) that this process holds of a tensor with `length` rows."""
        size = -(-length // self.mesh.size(-1))
        first = min(length, size * self.mesh.get_local_rank(self.mesh.ndim - 1))
        return first, min(length, first + size)


def _local(value: Tensor) -> Tensor:
    """This process's part of `value`, in the same memory and detached from gradients."""
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach()

"""Tensor parallelism as an `Engine`: the processes of a replica divide the matrix products of its blocks.

The architecture says which layers are divided (`Architecture.tensor_partition`). Embeddings, vocabulary head, norms and
the biases of row-parallel layers are whole on every process. Each process computes their gradients from the same bits
with the same dropout, so they stay equal without communication, provided that the processes of a replica round alike:
the same kind of device, as many threads. Processes communicate in every forward and backward (`tensor_layers`), in the
dtype of the activations, bf16 under autocast. Gradients of weights are float32; several replicas all-reduce them as
under DDP, each process with the processes at the same place of the other replicas.

The layers are our own: only a linear layer and its gradient need to be divided, a fused layer such as gpt2's (queries,
keys and values side by side) must be divided by heads, and a checkpoint wants weights under the module's names. Two
autograd functions with an all-reduce in one direction do that. DTensor and DeepSpeed's AutoTP would need the same plans
for models that they do not know (gpt2, gptj, bert), and rules for each operation on a part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from terakoya.components import Architecture, Optimizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.toolkit.architectures import attention
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn, SavedTensors
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_layers import ProcessTensorParallelGroup, WeightPartition, partition_blocks
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.engines.whole_tensors import Holding, WholeTensors, whole_names
from terakoya.training.model.module_parts import architecture_of, top_level_models

KEY = "parallel.tp_size"


class TensorParallelEngine(DDPEngine):
    """An `Engine` over replicas of `parallel.tp_size` processes. `model_state` and `optimizer_state` yield what this
    process holds: of a divided tensor its part.

    Attributes:
        partitions: name -> how each divided parameter is divided.
        whole: the parameters that the optimizer sees whole.
        divided, replicated: the trainable parameters that are divided, and all others.
        in_region: the replicated ones that each process applies to its own part: their gradients must be summed.
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
        precision: str,
        max_grad_norm: float,
        micro_steps: int,
        scaler: LossScaler | None = None,
    ) -> None:
        """Divides `module`, with the weights of rank 0, and builds its optimizer."""
        assert context.replica_group is not None, "a replica of several processes"
        members = context.topology.replica_ranks(context.replica)
        group = ProcessTensorParallelGroup(members.index(context.rank), len(members), context.replica_group)
        context.broadcast_module(module)
        has_dropout = attention.dropout(module) > 0
        partitions: dict[nn.Parameter, WeightPartition] = {}
        in_region: set[nn.Parameter] = set()
        for model in top_level_models(module):
            architecture = architecture_of(model, architectures, vocabulary, key=KEY)
            partition, blocks = architecture.tensor_partition(), architecture.blocks(model)
            assert partition is not None, "checked when the parameters are read"
            partitions |= partition_blocks(blocks, partition, group, dropout=context.device if has_dropout else None)
            for block in blocks:
                for name in partition.local:
                    in_region |= set(block.get_submodule(name).parameters())
        self.group = group
        self.partitions = {name: partitions[value] for name, value in module.named_parameters() if value in partitions}
        module.to(context.device)
        super().__init__(
            context,
            module,
            optimizer.build(module, fused=context.device.type in ("cpu", "cuda")),
            precision=precision,
            max_grad_norm=max_grad_norm,
            scaler=scaler,
            micro_steps=micro_steps,
        )
        names = {id(value): name for name, value in module.named_parameters()}
        holdings = {name: self._holding(name) for name in whole_names(optimizer, self.optimizer.param_groups, names)}
        self.whole = WholeTensors(self.optimizer, holdings, context.replica_group, device=context.device)
        self.dropout_rank = context.replica
        self.divided = [value for value in self.trainable if value in partitions]
        self.replicated = [value for value in self.trainable if value not in partitions]
        self.in_region = [value for value in self.trainable if value in in_region]

    def _holding(self, name: str) -> Holding:
        """This process's part of the parameter `name`: all of it where it is not divided."""
        value = self.module.get_parameter(name)
        if name not in self.partitions:
            return Holding(value, tuple(value.shape), lambda values: [whole_shard(name, values)])
        partition = self.partitions[name]
        (shard, *_) = partition.shards(name, value)
        return Holding(value, shard.shape, lambda values: partition.shards(name, values))

    # ------------------------------------------------------------------------------------------------- the loop

    def clip(self) -> Tensor:
        """See `DDPEngine`. Gradients of weights that each process applies to its own part are summed here, once a
        step."""
        if self.in_region:
            gradients = [value.grad for value in self.in_region if value.grad is not None]
            total = self.group.all_reduce(torch.cat([each.flatten() for each in gradients]))
            for gradient, summed in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        device = self.context.device
        squares = torch.stack([_norm(part, device) for part in (self.divided, self.replicated)]).double().square()
        if not self.context.is_replica_leader:
            squares[1] = 0.0  # counted once; the norm has the same bits on all processes
        norm = self.group.all_reduce(squares).sum().sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`."""
        return self._on_first_process(super().micro_step(batch, loss_fn, last=last))

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; collective within the replica."""
        return self._on_first_process(super().evaluate(batch))

    def _on_first_process(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The replica's `sums`, which all its processes have, on the first process, and zeros on the others."""
        return (
            sums if self.context.is_replica_leader else {name: torch.zeros_like(value) for name, value in sums.items()}
        )

    # --------------------------------------------------------------------------------------------- checkpoints

    def weight_shards(self) -> list[TensorShard]:
        """See `Engine`; of several replicas the first, and in it the first process for what is not divided."""
        shards: list[TensorShard] = []
        for name, value in self.module.named_parameters() if self.context.replica == 0 else ():
            if value.requires_grad and name in self.partitions:
                shards += self.partitions[name].shards(name, value.detach())
            elif value.requires_grad and self.context.is_main:
                shards.append(whole_shard(name, value.detach()))
        return shards

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Processes at the same place of their replicas share the writing of their divided tensors, all
        processes share the writing of the others."""
        context = self.context
        divided: list[TensorShard] = list(self.whole.state_shards()) if kind == "optimizer" else []
        replicated: list[TensorShard] = []
        for key, value in self.model_state() if kind == "model" else self.optimizer_state():
            name = key if kind == "model" else key.rpartition("/")[0]
            if name in self.partitions and value.ndim:  # a step count is not divided
                divided += self.partitions[name].shards(key, value)
            else:
                replicated.append(whole_shard(key, value))
        yield from assign_shards(divided, context.replica, context.topology.num_replicas)
        yield from assign_shards(replicated, context.rank, context.world_size)

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`."""
        super().load_parameters(lambda name: self._own_part(name, values(name)))

    def load_optimizer_state(self, values: SavedTensors, names: frozenset[str]) -> None:  # type: ignore[override]
        """See `Engine`."""
        super().load_optimizer_state(lambda key: self._own_part(key.rpartition("/")[0], values(key)), names)
        self.whole.load_state(values, names)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this process's part of each parameter that the optimizer updates as a part, with its name in the root
        module."""
        yield from ((name, value) for name, value in self.module.named_parameters() if name not in self.whole)

    def _own_part(self, name: str, value: Tensor) -> Tensor:
        """This process's part of `value`: of the parameter `name`, or of the optimizer's state of it."""
        return self.partitions[name].own_part(value) if name in self.partitions and value.ndim else value


def _norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The norm of the gradients of `parameters`, a float32 scalar."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    return nn.utils.get_total_norm(gradients, foreach=True) if gradients else torch.zeros((), device=device)

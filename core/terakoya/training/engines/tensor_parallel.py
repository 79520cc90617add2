"""Tensor parallelism as an `Engine`: the processes of a replica share the matrix products of its blocks.

What is cut is the architecture's to say (`Architecture.tensor_partition`). Embeddings, vocabulary head, norms and the
biases of layers whose outputs are added up lie whole on every process. Each computes their gradients from the same bits
with the same dropout, so they stay alike without being sent around, given processes of a replica that round alike: the
same kind of device, as many threads. Several replicas add up their gradients as under DDP, each process with those at
its place. What is added up amid a forward or backward is in the type of what is added, bf16 under autocast; gradients
of weights are float32.

The layers are our own: a linear layer and its gradient are all there is to cut, a fused layer as gpt2's (queries, keys
and values side by side) must be cut by heads, and a checkpoint wants weights under the module's names. Two functions
with a sum in one direction are that. DTensor and DeepSpeed's AutoTP would need the same plans for what they do not know
(gpt2, gptj, bert), and an answer for each operation that meets a part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.toolkit.architectures import attention
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_layers import ProcessTensorParallelGroup, WeightPartition, partition_blocks
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.model.module_parts import architecture_of, top_level_models

KEY = "parallel.tp_size"


class TensorParallelEngine(DDPEngine):
    """An `Engine` over replicas of `parallel.tp_size` processes. `parameters` and `optimizer_state` give what this
    process has: of what is cut its part."""

    full_module = False

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        parameters: Parameters,
        vocabulary: Vocabulary,
        *,
        scaler: LossScaler | None = None,
        micro_steps: int,
    ) -> None:
        """Cuts `module`, of which rank 0's weights count, and builds its optimizer."""
        assert context.replica_group is not None, "a replica of several processes"
        members = context.topology.replica_ranks(context.replica)
        place = ProcessTensorParallelGroup(members.index(context.rank), len(members), context.replica_group)
        context.broadcast_module(module)
        drawn = attention.dropout(module) > 0
        found: dict[nn.Parameter, WeightPartition] = {}
        on_parts: set[nn.Parameter] = set()
        for model in top_level_models(module):
            architecture = architecture_of(parameters, model, vocabulary, key=KEY)
            partition, blocks = architecture.tensor_partition(), architecture.blocks(model)
            assert partition is not None, "refused with the parameters"
            found |= partition_blocks(blocks, partition, place, dropout=context.device if drawn else None)
            for block in blocks:
                for name in partition.local:
                    on_parts |= set(block.get_submodule(name).parameters())
        self.place = place
        self.cuts = {name: found[value] for name, value in module.named_parameters() if value in found}
        module.to(context.device)
        super().__init__(
            context,
            module,
            parameters.optimizer.build(module, fused=context.device.type in ("cpu", "cuda")),
            precision=parameters.precision,
            max_grad_norm=parameters.max_grad_norm,
            scaler=scaler,
            micro_steps=micro_steps,
        )
        self.dropout_rank = context.replica
        self.parted = [value for value in self.trainable if value in found]
        self.alike = [value for value in self.trainable if value not in found]
        self.on_parts = [value for value in self.trainable if value in on_parts]

    # ------------------------------------------------------------------------------------------------- the loop

    def clip(self) -> Tensor:
        """See `DDPEngine`. Gradients of what every process applies to its own part are added up here, once a step."""
        if self.on_parts:
            gradients = [value.grad for value in self.on_parts if value.grad is not None]
            total = self.place.all_reduce(torch.cat([each.flatten() for each in gradients]))
            for gradient, added in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(added.view_as(gradient))
        device = self.context.device
        squares = torch.stack([_norm(part, device) for part in (self.parted, self.alike)]).double().square()
        if not self.context.is_replica_leader:
            squares[1] = 0.0  # counted once, and the same bits for all
        norm = self.place.all_reduce(squares).sum().sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`."""
        return self._counted(super().micro_step(batch, loss_fn, last=last))

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; collective within the replica."""
        return self._counted(super().evaluate(batch))

    def _counted(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`sums`, which all processes of a replica have, on its first, and zeros on the others."""
        return (
            sums if self.context.is_replica_leader else {name: torch.zeros_like(value) for name, value in sums.items()}
        )

    # --------------------------------------------------------------------------------------------- checkpoints

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. What is cut is dealt among the processes at one place of their replicas, the rest among all."""
        context = self.context
        cut: list[TensorShard] = []
        rest: list[TensorShard] = []
        for key, value in self.parameters() if kind == "model" else self.optimizer_state():
            name = key if kind == "model" else key.rpartition("/")[0]
            if name in self.cuts and value.ndim:  # a step count is whole
                cut += self.cuts[name].boxes(key, value)
            else:
                rest.append(whole_shard(key, value))
        yield from assign_shards(cut, context.replica, context.topology.num_replicas)
        yield from assign_shards(rest, context.rank, context.world_size)

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`."""
        super().load_parameters(lambda name: self._own(name, values(name)))

    def load_optimizer_state(self, values: Callable[[str], Tensor], names: frozenset[str]) -> None:
        """See `Engine`."""
        super().load_optimizer_state(lambda key: self._own(key.rpartition("/")[0], values(key)), names)

    def _own(self, name: str, value: Tensor) -> Tensor:
        """This process's part of `value`: of the parameter `name`, or of what an optimizer keeps of it."""
        return self.cuts[name].own(value) if name in self.cuts and value.ndim else value


def _norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The norm of the gradients of `parameters`, a float32 scalar."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    return nn.utils.get_total_norm(gradients, foreach=True) if gradients else torch.zeros((), device=device)

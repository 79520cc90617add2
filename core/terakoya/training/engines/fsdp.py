"""torch's `fully_shard` (FSDP2; Zhao et al., 2023, arXiv:2304.11277) as an `Engine`: each process keeps some rows of
every weight, of its gradient and of its optimizer state.

Each block of each model is a group, all else (embeddings, heads, weights that several modules share) is one more. A
block's weights are gathered for its forward and again for its backward, and are let go after either; those of the rest
stay in between. Of a weight with n rows the first ceil(n / processes) lie with the first process, and so on: the last
ones may have fewer, or none.

The optimizer sees rows as plain tensors. Weights, gradients and state are fp32; bf16 and fp16 are autocast in the
module's forward, as under DDP. Checkpoints hold tensors under the module's names: one written by any engine or number
of processes is read by any other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn, Values
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.model.module_parts import architecture_of, saved_values, top_level_models


class FSDPEngine(DDPEngine):
    """An `Engine` whose module is cut up by `fully_shard`, over two or more processes.

    Attributes:
        groups: the modules whose weights travel together; the root module, which has the rest, is the last.
        cut: by name each parameter that is trained, a DTensor.
        shards: this process's rows of it as a plain tensor: what the optimizer knows.
    """

    full_module = False

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        parameters: Parameters,
        vocabulary: Vocabulary,
        *,
        scaler: LossScaler | None = None,
    ) -> None:
        """Cuts up `module`, whose weights are rank 0's.

        Raises:
            UserError: no architecture of `parameters` says where a model's blocks are, or a weight cannot be cut up.
        """
        assert parameters.optimizer.elementwise, "refused with the parameters"
        assert context.data_parallel_group is not None, "one process has nothing to share"
        optimizer = parameters.optimizer.build(module, fused=context.device.type in ("cpu", "cuda"))
        names = {id(value): name for name, value in module.named_parameters()}
        given = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        begun = {names[id(each)]: state for each, state in optimizer.state.items()}
        for group in optimizer.param_groups:
            group["params"] = []  # a reference would keep the whole weight on the device
        optimizer.state.clear()
        context.broadcast_module(module)
        self.mesh = DeviceMesh.from_group(context.data_parallel_group, context.device.type)
        self.groups = shard_module(parameters, module, vocabulary, self.mesh)
        super().__init__(
            context, module, optimizer,
            precision=parameters.precision, max_grad_norm=parameters.max_grad_norm, scaler=scaler,
        )  # fmt: skip
        self.cut = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.shards = {name: nn.Parameter(_local(value)) for name, value in self.cut.items()}
        for group, its_names in zip(optimizer.param_groups, given, strict=True):
            group["params"] = [self.shards[name] for name in its_names]
        for name, state in begun.items():  # Adagrad, for one, has a state before its first step
            optimizer.state[self.shards[name]] = {
                key: value[slice(*self._rows(len(value)))].to(context.device, copy=True) if value.ndim else value
                for key, value in state.items()
            }
        self.trainable = list(self.shards.values())

    def reducing(self) -> None:
        """Nobody: `fully_shard` adds gradients up itself."""

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. Gradients are added up in every micro-step: whole ones of its own, kept until the last, would
        take as much memory on each process as `fully_shard` spares."""
        sums = super().micro_step(batch, loss_fn, last=last)
        if last:
            for value, shard in zip(self.cut.values(), self.trainable, strict=True):
                if value.grad is not None:
                    shard.grad, value.grad = _local(value.grad), None
        return sums

    def clip(self) -> Tensor:
        """See `DDPEngine`. The norm is that of all rows, so that all processes clip, or leave a step out, alike."""
        gradients = [shard.grad for shard in self.trainable if shard.grad is not None and shard.numel()]
        mine = nn.utils.get_total_norm(gradients, foreach=True).to(self.context.device, torch.float64)
        norm = self.context.sum_on_device(mine.square()).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    # --------------------------------------------------------------------------------------------- checkpoints

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Each process writes its own rows, without gathering; what all have alike is dealt."""
        alike = []
        for name, value, shape in self._weights() if kind == "model" else self._state():
            if shape is None:
                alike.append(whole_shard(name, value))
            elif value.numel():
                first, _ = self._rows(shape[0])
                yield TensorShard(name, value, shape, (first, *(0 for _ in shape[1:])))
        yield from assign_shards(alike, self.context.rank, self.context.world_size)

    def _weights(self) -> Iterator[tuple[str, Tensor, tuple[int, ...] | None]]:
        """Of each parameter and buffer of `saved_values` its name, what lies here, and the whole's shape if that is
        rows of it."""
        self.groups[-1].reshard()  # after a forward without a backward the root's weights are whole
        for name, value in saved_values(self.module):
            yield name, _local(value), tuple(value.shape) if isinstance(value, DTensor) else None

    def _state(self) -> Iterator[tuple[str, Tensor, tuple[int, ...] | None]]:
        """The same of the optimizer's state, in which scalars are counts of steps."""
        for key, value in self.optimizer_state():
            yield key, value, tuple(self.cut[key.rpartition("/")[0]].shape) if value.ndim else None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The rows that this process has of each parameter that is trained."""
        yield from self.shards.items()

    def load_parameters(self, values: Values) -> None:  # type: ignore[override] # the protocol's, read in parts
        """See `Engine`. Each process reads its own rows."""
        for name, value, shape in self._weights():
            value.copy_(values(name) if shape is None else self._read(values, name))

    def load_optimizer_state(self, values: Values, names: frozenset[str]) -> None:  # type: ignore[override]
        """See `Engine`."""
        super().load_optimizer_state(lambda key: self._read(values, key) if values.shape(key) else values(key), names)

    def _read(self, values: Values, name: str) -> Tensor:
        """This process's rows of the tensor `name`."""
        length, *rest = values.shape(name)
        (first, last), width = self._rows(length), math.prod(rest)
        return values.part(name, first * width, (last - first) * width).view(last - first, *rest)

    def _rows(self, length: int) -> tuple[int, int]:
        """The rows [first, last) that lie here of a tensor with `length` rows."""
        size = -(-length // self.mesh.size())
        first = min(length, size * self.mesh.get_local_rank())
        return first, min(length, first + size)


def shard_module(
    parameters: Parameters, module: nn.Module, vocabulary: Vocabulary, mesh: DeviceMesh
) -> list[FSDPModule]:
    """Cuts up `module` over `mesh` and moves it to the device, group by group; returns the groups, the root last.

    Raises:
        UserError: no architecture of `parameters` says where a model's blocks are, or a weight is a scalar.
    """
    for name, value in module.named_parameters():
        if value.ndim == 0:
            raise UserError(
                f'parallel.engine "fsdp": {name} is a scalar, which has no rows to share; use engine "ddp", or make it '
                "a tensor of one element"
            )
    groups = []
    for group in [*shardable_blocks(parameters, module, vocabulary), module]:
        groups.append(fully_shard(group, mesh=mesh))
        # losses are shares of a global mean already, so gradients are added up and not averaged
        groups[-1].set_gradient_divide_factor(1.0)
        groups[-1].set_force_sum_reduction_for_comms(True)
    return groups


def shardable_blocks(parameters: Parameters, module: nn.Module, vocabulary: Vocabulary) -> list[nn.Module]:
    """The blocks of every model in `module`, each once, but for those with a weight that others have too.

    Raises:
        UserError: no architecture of `parameters` says where a model's blocks are.
    """
    found = dict.fromkeys(
        block
        for model in top_level_models(module)
        for block in architecture_of(parameters, model, vocabulary, key='parallel.engine "fsdp"').blocks(model)
    )
    everywhere = Counter(map(id, _occurrences(module)))
    return [
        block
        for block in found
        if all(everywhere[each] == count for each, count in Counter(map(id, _occurrences(block))).items())
    ]


def _occurrences(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of `module`, as often as they occur in it."""
    for _, parameter in module.named_parameters(remove_duplicate=False):
        yield parameter


def _local(value: Tensor) -> Tensor:
    """What of `value` lies in this process; shares its memory, and no gradient goes through."""
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach()

"""Fully sharded, tensor, pipeline and sequence parallelism, alone and together, as one `Engine`.

Each of them divides another thing among the processes of a `ProcessMesh`:

- `pp_size`: blocks. A process keeps some stages of the model (`pipeline_stage`), which `pipeline` runs.
- `tp_size`: matrix products within blocks, as `Architecture.tensor_partition` says (`tensor_layers`), and the rows of
  embeddings and of the vocabulary head (`vocabulary_layers`). What is not divided (norms, embeddings of positions, the
  biases of row-parallel layers) is whole on every process, which computes its gradients from the same bits with the
  same dropout, provided that the processes of a replica round alike: the same kind of device, as many threads. With
  `sequence_parallel` a process has only its own positions of hidden states in blocks between the matrix products, and
  gradients of what is whole in blocks are summed.
- `sp_size`: positions of rows (`sequence_parallel`); processes exchange heads for positions in attention.
- `cp_size`: positions of rows, too; processes gather keys and values in attention. Both are the axis `sp` of the mesh.
- `"engine": "fsdp"`: weights, gradients and optimizer state, by rows, among the processes that otherwise hold the same
  ones, with torch's `fully_shard` (FSDP2; Zhao et al., 2023, arXiv:2304.11277). With `dp_shard_size` groups of
  replicas, such as those of a node, share weights among themselves and add up their gradients (hybrid sharding).

They apply in this order: of its stages a process keeps its part of the layers, and of these its rows. Without `fsdp`
replicas keep equal weights, and all-reduce gradients once a step.

Under `fully_shard` each block of each model is a group, and everything else (embeddings, heads, weights that several
modules share) is one more. A block's weights are all-gathered for its forward and again for its backward, and freed
after each; those of the last group stay gathered in between. Gradients are reduce-scattered in every micro-step's
backward. In a pipeline many micro-batches pass through a stage before the first has come back, so its weights stay
gathered from the first to the last of a step, and its gradients whole until then: what is saved is what ZeRO 2 saves.
In bf16 and fp16 a block's matrices are gathered in 16 bits, to which autocast would cast them anyway, and their
gradients are summed in fp32: the numbers are those of DDP.

The optimizer sees the parts as plain tensors, or whole tensors where it needs them (`whole_tensors`), in fp32.
Checkpoints hold tensors under the module's names: a checkpoint of any engine or number of processes can be read by any
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from terakoya.components import Architecture, Optimizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parallel import Parallel
from terakoya.toolkit.architectures.attention import EXCHANGE, QUERIES
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.mesh import AXES, DATA, ProcessMesh
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn, SavedTensors
from terakoya.training.engines.fsdp_groups import shard_module
from terakoya.training.engines.gradient_sums import all_reduce_gradients
from terakoya.training.engines.initial_weights import InitialWeights
from terakoya.training.engines.learning_rates import build_optimizer
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.pipeline import LocalStages, Pipeline
from terakoya.training.engines.pipeline_stage import Stage, build_stage
from terakoya.training.engines.sequence_attention import KeyValueExchange, UlyssesExchange
from terakoya.training.engines.sequence_parallel import position_slice, slice_positions
from terakoya.training.engines.tensor_division import divide_models
from terakoya.training.engines.tensor_layers import ProcessTensorParallelGroup
from terakoya.training.engines.tensor_shards import Kind, TensorPart, TensorShard, assign_shards
from terakoya.training.engines.whole_tensors import Holding, WholeTensors, whole_names
from terakoya.training.model.deferred import DeferredTensors
from terakoya.training.model.module_parts import named_values, saved_values

SHARE = ("dp_shard", "sp")
"""The axes along which `fully_shard` divides weights: without it, processes along them hold the same ones."""


class ParallelEngine(DDPEngine):
    """An `Engine` over the processes of a mesh. See the module's docstring.

    Attributes:
        processes: the mesh.
        pipeline: what runs the stages; None where this process has all blocks.
        division: how layers are divided; None where each process has whole ones.
        exchange: what gives attention whole rows; None where each process has them.
        groups: of each stage, or of the root module, the modules whose weights `fully_shard` gathers together; the one
            with all other weights is the last. Empty without `fully_shard`.
        parts: name -> where this process's values of each parameter and buffer are in the whole tensor.
        alike: name -> the axes along which processes hold the same values.
        owners: name -> number along `pp` of the first process that holds the tensor. A matrix that is both embedding
            and vocabulary head is on the first and on the last.
        counted: those of `trained` that no process before this one holds too.
        sharing: the axes along which processes have parts of the same tensors.
        whole: the parameters that the optimizer sees whole.
        trained: name -> what the optimizer updates: a parameter, or this process's rows of it as a plain tensor.
    """

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
        micro_steps: int,
        scaler: LossScaler | None = None,
        learning_rate_shares: Mapping[str, float] = MappingProxyType({}),
        deferred: DeferredTensors | None = None,
    ) -> None:
        """Keeps this process's parts of `module`, with the weights of rank 0, and builds their optimizer. `deferred`
        computes them where the module was built without them.

        Raises:
            UserError: there are fewer blocks than stages; under `fully_shard` none of `architectures` defines a model's
                blocks, a weight cannot be sharded, or `dp_shard_size` does not divide the replicas.
        """
        mesh = self.processes = ProcessMesh.of(context, parallel)
        sharded = parallel.engine == "fsdp" and mesh.size(*SHARE) > 1
        exchange = UlyssesExchange if parallel.sp_size > 1 else KeyValueExchange
        self.exchange = None if (group := mesh.group("sp")) is None else exchange(group)
        initial = InitialWeights(module, deferred, context)
        names = {id(value): name for name, value in named_values(module)}

        # The stages, and of them the parts of layers.
        stage_count = parallel.pp_size * parallel.pp_stages_per_process
        numbers = range(mesh.index("pp"), stage_count, parallel.pp_size) if parallel.pp_size > 1 else ()
        stages = [
            build_stage(
                module, architectures, vocabulary,
                index=number, count=stage_count, device=context.device, precision=precision,
            )
            for number in numbers
        ]  # fmt: skip
        self.pipeline = None
        if (group := mesh.group("pp")) is not None:
            self.pipeline = Pipeline(
                stages, stage_count, group, mesh.members("pp"), context.device,
                zero_bubble=parallel.pp_schedule == "zero_bubble", micro_steps=micro_steps,
            )  # fmt: skip
        local = LocalStages(stages) if stages else module
        self.names = {own: names[id(value)] for own, value in named_values(local)}
        self.division = None
        if (group := mesh.group("tp")) is not None:
            layers = ProcessTensorParallelGroup(
                mesh.index("tp"), mesh.size("tp"), group, sequence_parallel=parallel.sequence_parallel
            )
            with initial.deferring():
                self.division = divide_models(local, architectures, vocabulary, layers, context.device)

        self.parts, self.alike = self._locate(local, sharded=sharded)
        held = context.gather(set(self.parts)) if stages else []
        ranks = mesh.members("pp") if stages else []
        holders = {name: [n for n, rank in enumerate(ranks) if name in held[rank]] or [0] for name in self.parts}
        self.owners = {name: numbers[0] for name, numbers in holders.items()}

        # Their optimizer, and rows of weights.
        if not sharded:
            initial.fill(local, self.names, self.parts)
            local.to(context.device)
        own_names = {id(value): self.names[own] for own, value in local.named_parameters()}
        fused = context.device.type in ("cpu", "cuda")
        with initial.deferring():
            built = build_optimizer(optimizer, local, learning_rate_shares, fused=fused, names=own_names)
        self.sharing = (*(SHARE if sharded else ()), *(("tp",) if self.division else ()))
        seen_whole = whole_names(optimizer, built.param_groups, own_names) if self.sharing else frozenset()
        in_region = set() if self.division is None else self.division.in_region
        own_in_region = [own for own, value in local.named_parameters() if value in in_region]
        self.groups: list[list[FSDPModule]] = []
        self.sharded: dict[str, Tensor] = {}
        state: Mapping[str, dict[str, Any]] = {}
        if sharded:
            state = self._shard(local, stages, built, own_names, architectures, vocabulary, precision)
            initial.fill(local, self.names, self.parts)
        super().__init__(
            context,
            local,
            built,
            precision="fp32" if stages else precision,  # each stage runs autocast itself: no forward contains all
            max_grad_norm=max_grad_norm,
            scaler=scaler,
            micro_steps=micro_steps,
        )
        self.full_module = not (stages or sharded or self.division)
        self.dropout_rank = mesh.index(*DATA, "sp")
        weights = {self.names[own]: value for own, value in local.named_parameters() if value.requires_grad}
        self.trained: dict[str, nn.Parameter] = self._rows_of(weights) if sharded else weights
        holdings = {
            name: Holding(self.trained[name], self.parts[name].shape, partial(self.parts[name].shards, name))
            for name in seen_whole
        }
        self.whole = WholeTensors(
            built, holdings, mesh.group(*self.sharing), device=context.device,
            state={
                name: {key: initial.value(value) for key, value in found.items()}
                for name, found in state.items()
                if name in seen_whole
            },
        )  # fmt: skip
        place = mesh.index(*SHARE), mesh.size(*SHARE)
        for name in state.keys() - seen_whole:  # Adagrad, for one, has a state before its first step
            built.state[self.trained[name]] = {
                key: TensorPart.whole(value.shape).rows(*place).cut(initial.value(value)).to(context.device)
                if value.ndim
                else value
                for key, value in state[name].items()
            }
        self.trainable = list(self.trained.values())
        self.counted = {
            name: value
            for name, value in self.trained.items()
            if self.owners[name] == mesh.index("pp") and mesh.index(*self.alike[name]) == 0 and value.numel()
        }
        self.in_region = [self.trained[self.names[own]] for own in own_in_region if self.names[own] in self.trained]
        self.tied = [value for name, value in self.trained.items() if len(holders[name]) > 1]
        self.ends = mesh.ends() if stages else None

    def _locate(self, local: nn.Module, *, sharded: bool) -> tuple[dict[str, TensorPart], dict[str, tuple[str, ...]]]:
        """Returns `parts` and `alike` of the values in `local`, before it is sharded."""
        mesh, divided = self.processes, {} if self.division is None else self.division.parts
        parts, alike = {}, {}
        for own, value in named_values(local):
            part, axes = TensorPart.whole(value.shape), {*DATA, "sp", "tp"}
            if isinstance(value, nn.Parameter) and value in divided:
                part, axes = divided[value], axes - {"tp"}
            if isinstance(value, nn.Parameter) and sharded:
                part, axes = part.rows(mesh.index(*SHARE), mesh.size(*SHARE)), axes - {*SHARE}
            parts[self.names[own]], alike[self.names[own]] = part, tuple(sorted(axes, key=AXES.index))
        return parts, alike

    def _shard(
        self,
        local: nn.Module,
        stages: Sequence[Stage],
        built: torch.optim.Optimizer,
        names: Mapping[int, str],
        architectures: Sequence[Architecture],
        vocabulary: Vocabulary,
        precision: str,
    ) -> Mapping[str, dict[str, Any]]:
        """Shards the module. The optimizer that was `built` for it gets `names` in the place of parameters, which would
        keep whole weights on the device; returns its state by name."""
        for group in built.param_groups:
            group["params"] = [names[id(each)] for each in group["params"]]
        state = {names[id(each)]: found for each, found in built.state.items()}
        built.state.clear()
        mesh = self.processes.device_mesh(("dp_replicate",), SHARE)
        modules: Sequence[nn.Module] = stages or [local]
        for module in modules:
            groups = shard_module(
                module, architectures, vocabulary, mesh, precision=precision, stays_gathered=bool(stages)
            )
            self.groups.append(groups)
        return state

    def _rows_of(self, weights: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Gives the optimizer this process's rows of the sharded `weights`; returns them by name."""
        self.sharded = dict(weights)
        rows = {name: nn.Parameter(_local(value)) for name, value in weights.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [rows[name] for name in group["params"]]
        return rows

    def gradient_group(self) -> dist.ProcessGroup | None:
        """See `DDPEngine`: the processes that hold the same weights. None where `fully_shard` sums gradients itself,
        and for stages, because DDP needs one forward over all."""
        return None if self.groups or self.pipeline is not None else self.processes.group(*DATA, "sp")

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. Under `fully_shard` gradients are reduced in every micro-step: whole gradients, kept until the
        last micro-step, would take as much memory on each process as it saves. Replicas of the shards add theirs up
        once."""
        if self.pipeline is not None:
            scale = None if self.scaler is None else self.scaler.scale
            sums = self.pipeline.micro_step(self._own_positions(batch), loss_fn, scale, last=last)
        else:
            for groups in self.groups:
                groups[-1].set_requires_all_reduce(last)
            sums = super().micro_step(self._own_positions(batch), loss_fn, last=last)
        if last:
            self._finish_gradients()
        return self._counted_once(sums)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; collective within the replica."""
        own = self._own_positions(batch)
        return self._counted_once(super().evaluate(own) if self.pipeline is None else self.pipeline.evaluate(own))

    def _own_positions(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The part of `batch` at this process's positions, with what gives attention whole rows."""
        if self.exchange is None:
            return batch
        index, processes = self.processes.index("sp"), self.processes.size("sp")
        part = {**slice_positions(batch, index, processes), EXCHANGE: self.exchange}
        is_gathered = isinstance(self.exchange, KeyValueExchange)
        return {**part, QUERIES: position_slice(batch, index, processes)} if is_gathered else part

    def _counted_once(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The `sums`, which all processes along `tp` have, on the first of them, and zeros on the others."""
        first = self.processes.index("tp") == 0
        return sums if first else {name: torch.zeros_like(value) for name, value in sums.items()}

    def _finish_gradients(self) -> None:
        """Gives each trained part its gradient, summed over all processes that have a part in it."""
        for name, value in self.sharded.items():
            if value.grad is not None:
                self.trained[name].grad, value.grad = _local(value.grad), None
        if self.pipeline is not None and not self.groups:
            all_reduce_gradients(self.trainable, self.processes.group(*DATA, "sp"))
        all_reduce_gradients(self.in_region, self.processes.group("tp"))
        all_reduce_gradients(self.tied, self.ends)

    def clip(self) -> Tensor:
        """See `DDPEngine`. The norm is that of all processes' parts, each counted once, so that all clip, or skip a
        step, alike."""
        gradients = [value.grad for value in self.counted.values() if value.grad is not None]
        norm = torch.zeros((), dtype=torch.float64, device=self.context.device)
        if gradients:
            norm += nn.utils.get_total_norm(gradients, foreach=True).double().square()
        norm = self.context.sum_on_device(norm).sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    # --------------------------------------------------------------------------------------------- checkpoints

    def weight_shards(self) -> list[TensorShard]:
        """See `Engine`."""
        counted = self.counted.items()
        return [shard for name, value in counted for shard in self.parts[name].shards(name, value.detach())]

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Nothing is gathered: each process writes its own parts; processes that hold the same ones share
        the writing, and a tied matrix is the first stage's."""
        mesh = self.processes
        shards: defaultdict[tuple[str, ...], list[TensorShard]] = defaultdict(list)
        for key, value in self.model_state() if kind == "model" else self.optimizer_state():
            name = key if kind == "model" else key.rpartition("/")[0]
            if self.owners[name] == mesh.index("pp"):
                part, axes = self.parts[name], self.alike[name]
                if value.shape != part.local_shape:  # a step count is not divided
                    part, axes = TensorPart.whole(value.shape), AXES[1:]
                shards[axes] += part.shards(key, value)
        if kind == "optimizer":
            axes = tuple(axis for axis in AXES[1:] if axis not in self.sharing)
            shards[axes] += [
                each
                for each in self.whole.state_shards()
                if self.owners[each.name.rpartition("/")[0]] == mesh.index("pp")
            ]
        for axes in sorted(shards):
            yield from assign_shards(shards[axes], mesh.index(*axes), mesh.size(*axes))

    def model_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and this process's part of each of `saved_values`."""
        for group in (each for groups in self.groups for each in groups):
            group.reshard()  # after a forward without a backward some weights are still gathered
        for own, value in saved_values(self.module):
            yield self.names[own], _local(value)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this process's part of each parameter that the optimizer updates as a part, with its name in the root
        module."""
        for own, value in self.module.named_parameters():
            if self.names[own] not in self.whole:
                yield self.names[own], self.trained.get(self.names[own], value)

    def load_parameters(self, values: SavedTensors) -> None:  # type: ignore[override] # needs `box`
        """See `Engine`. Each process reads its own parts."""
        for name, value in self.model_state():
            value.copy_(self._read(values, name, name))

    def load_optimizer_state(self, values: SavedTensors, names: frozenset[str]) -> None:  # type: ignore[override]
        """See `Engine`."""
        super().load_optimizer_state(lambda key: self._read(values, key, key.rpartition("/")[0]), names)
        self.whole.load_state(values, names)

    def _read(self, values: SavedTensors, key: str, name: str) -> Tensor:
        """Reads this process's part of the tensor `key`: the parameter `name`, or optimizer state of it."""
        part, shape = self.parts[name], values.shape(key)
        if shape != part.shape:
            part = TensorPart.whole(shape)
        boxes = [values.box(key, *box) for box in part.boxes]
        return boxes[0] if len(boxes) == 1 else torch.cat(boxes, part.axis)


def _local(value: Tensor) -> Tensor:
    """This process's part of `value`, in the same memory and detached from gradients."""
    with torch.no_grad():
        return (value.to_local() if isinstance(value, DTensor) else value).detach()

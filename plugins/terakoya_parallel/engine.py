"""Fully sharded, tensor, pipeline and sequence parallelism, alone and together, as one `Engine`.

Each of them divides another thing among the processes of a `ProcessMesh`:

- `pp_size`: blocks. A process keeps some stages of the model (`pipeline_stage`), which `pipeline` runs.
- `tp_size`: matrix products within blocks, as `Architecture.tensor_partition` says (`tensor_layers`), and the rows of
  embeddings and of the vocabulary head (`tensor_division`). What is not divided (norms, embeddings of positions, the
  biases of row-parallel layers) is whole on every process, which computes its gradients from the same bits with the
  same dropout, provided that the processes of a replica round alike: the same kind of device, as many threads. With
  `sequence_parallel` a process has only its own positions of hidden states in blocks between the matrix products, and
  gradients of what is whole in blocks are summed.
- `sp_size`: positions of rows (`sequence_parallel`); processes exchange heads for positions in attention.
- `cp_size`: positions of rows, too; processes gather keys and values in attention. Both are the axis `sp` of the mesh.
- `"engine": "fsdp"`: weights, gradients and optimizer state, by rows, among the processes that otherwise hold the same
  ones, with torch's `fully_shard` (FSDP2; Zhao et al., 2023, arXiv:2304.11277). With `dp_shard_size` groups of
  replicas, such as those of a node, share weights among themselves and add up their gradients (hybrid sharding).

They apply in this order (`held_module`): of its stages a process keeps its part of the layers, and of these its rows.
Without `fsdp` replicas keep equal weights, and all-reduce gradients once a step.

Under `fully_shard` each block of each model is a group, and everything else (embeddings, heads, weights that several
modules share) is one more. A block's weights are all-gathered for its forward and again for its backward, and freed
after each; those of the last group stay gathered in between. Gradients are reduce-scattered in every micro-step's
backward. In a pipeline many micro-batches pass through a stage before the first has come back, so its weights stay
gathered from the first to the last of a step, and its gradients whole until then: what is saved is what ZeRO 2 saves.
In bf16 and fp16 a block's matrices are gathered in 16 bits, to which autocast would cast them anyway, and their
gradients are summed in fp32: the numbers are those of DDP. So they are where layers read copies of their weights, as in
the bf16 stream: what has copies is gathered as these, with gradients in fp32.

The optimizer sees the parts as plain tensors, or whole tensors where it needs them (`whole_tensors`), in fp32.
Checkpoints hold tensors under the module's names: a checkpoint of any engine or number of processes can be read by any
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terakoya.training.engines.ddp import DDPEngine, StepOptions
from terakoya.training.engines.engine import LossFn, SavedTensors
from terakoya.training.engines.inputs import EngineInputs
from terakoya.training.engines.learning_rates import build_optimizer
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_names
from terakoya.training.model.module_parts import saved_values
from terakoya.training.model.transforms import transform
from terakoya_parallel.fsdp_groups import local_values
from terakoya_parallel.held_module import SHARE, hold_parts
from terakoya_parallel.initial_weights import InitialWeights
from terakoya_parallel.mesh import AXES, DATA, ProcessMesh
from terakoya_parallel.pipeline import Pipeline
from terakoya_parallel.sequence_parallel import KeyValueExchange, UlyssesExchange, own_positions
from terakoya_parallel.tensor_part import TensorPart
from terakoya_parallel.whole_tensors import Holding, WholeTensors


class ParallelEngine(DDPEngine):
    """An `Engine` over the processes of a mesh. See the module's docstring.

    Attributes:
        processes: the mesh.
        pipeline: what runs the stages; None where this process has all blocks.
        exchange: what gives attention whole rows; None where each process has them.
        names, parts, alike, groups: as in `HeldModule`.
        first_here: names of what no process before this one along `pp` holds, too. A matrix that is both embedding and
            vocabulary head is on the first and on the last.
        sharing: the axes along which processes have parts of the same tensors.
        sharded: name -> what `fully_shard` has of a trained parameter. Empty without it.
        trained: name -> what the optimizer updates: a parameter, or this process's rows of it as a plain tensor.
        whole: the parameters that the optimizer sees whole.
        counted: those of `trained` that no process before this one holds too.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        """Keeps this process's parts of the module, with the weights of rank 0, and builds their optimizer.

        Raises:
            UserError: as `hold_parts`, or `dp_shard_size` does not divide the replicas.
        """
        parameters, module, context = inputs.parameters, inputs.module, inputs.context
        parallel, optimizer, precision = parameters.parallel, parameters.optimizer, parameters.precision
        mesh = self.processes = ProcessMesh.of(context, parallel)
        exchange = UlyssesExchange if parallel.sp_size > 1 else KeyValueExchange
        self.exchange = None if (group := mesh.group("sp")) is None else exchange(group)
        initial = InitialWeights(module, inputs.deferred, context)
        gathers = parallel.engine == "fsdp" and mesh.size(*SHARE) > 1
        copies = transform("engine", module, replace(inputs.run, gathers=True)) if gathers else []
        held = hold_parts(module, inputs.run, mesh, copies)
        self.names, self.parts, self.alike, self.groups = held.names, held.parts, held.alike, held.groups
        initial.fill(held.module, held.names, held.parts)
        local = held.module.to(context.device)
        self.pipeline: Pipeline | None = None
        if (group := mesh.group("pp")) is not None:
            zero_bubble = parallel.pp_schedule == "zero_bubble"
            self.pipeline = Pipeline(held.stages, group, zero_bubble=zero_bubble, micro_steps=inputs.micro_steps)

        # Their optimizer is built for parameters, under `fully_shard` DTensors, and updates plain tensors.
        own_names = {id(value): self.names[own] for own, value in local.named_parameters()}
        fused = context.device.type in ("cpu", "cuda")
        built = build_optimizer(optimizer, local, inputs.learning_rate_shares, fused=fused, names=own_names)
        super().__init__(
            context,
            local,
            built,
            StepOptions(
                "fp32" if held.stages else precision,  # each stage runs autocast itself: no forward contains all
                parameters.max_grad_norm,
                inputs.scaler,
                inputs.micro_steps,
            ),
        )
        self.keep_up_to_date(copies)
        self.sharing = (*(SHARE if self.groups else ()), *(("tp",) if mesh.size("tp") > 1 else ()))
        self.full_module = not (held.stages or self.sharing)
        self.dropout_rank = mesh.index(*DATA, "sp")
        weights = {self.names[own]: value for own, value in local.named_parameters() if value.requires_grad}
        self.sharded = weights if self.groups else {}
        self.trained = weights
        if self.groups:
            self.trained = {name: nn.Parameter(local_values(value)) for name, value in weights.items()}
        seen_whole = whole_names(optimizer, built.param_groups, own_names) if self.sharing else frozenset()
        before_steps = self._give_trained(weights, own_names, seen_whole)
        holdings = {
            name: Holding(self.trained[name], self.parts[name].shape, partial(self.parts[name].shards, name))
            for name in seen_whole
        }
        group = mesh.group(*self.sharing)
        self.whole = WholeTensors(built, holdings, group, device=context.device, state=before_steps)
        self.trainable = list(self.trained.values())

        # What several processes hold.
        along_pipeline = [set(self.parts)]
        if held.stages:
            every = context.gather(along_pipeline[0])
            along_pipeline = [every[rank] for rank in mesh.members("pp")]
        self.first_here = self.parts.keys() - set().union(*along_pipeline[: mesh.index("pp")])
        self.counted = {
            name: value
            for name, value in self.trained.items()
            if name in self.first_here and mesh.index(*self.alike[name]) == 0 and value.numel()
        }
        self.in_region = [self.trained[name] for name in held.in_region if name in self.trained]
        self.tied = [value for name, value in self.trained.items() if sum(name in each for each in along_pipeline) > 1]
        self.ends = mesh.ends() if held.stages else None

    def _give_trained(
        self, weights: Mapping[str, Tensor], names: Mapping[int, str], seen_whole: Set[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Gives the optimizer, which was built for the `weights` of the module, what is trained instead. Some, such as
        Adagrad, have a state before the first step: of those in `seen_whole` it is returned, whole, by name."""
        state, whole_state = self.optimizer.state, {}
        for name, value in weights.items():
            found = state.pop(value, {})
            if name in seen_whole:
                whole_state[name] = {
                    key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in found.items()
                }
            elif found:
                state[self.trained[name]] = {key: local_values(each) for key, each in found.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [self.trained[names[id(each)]] for each in group["params"]]
        return whole_state

    def gradient_group(self) -> dist.ProcessGroup | None:
        """See `DDPEngine`: the processes that hold the same weights. None where `fully_shard` sums gradients itself,
        and for stages, because DDP needs one forward over all."""
        return None if self.groups or self.pipeline is not None else self.processes.group(*DATA, "sp")

    # ------------------------------------------------------------------------------------------------- the loop

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`. Under `fully_shard` gradients are reduced in every micro-step: whole gradients, kept until the
        last micro-step, would take as much memory on each process as it saves. Replicas of the shards add theirs up
        once."""
        own = own_positions(batch, self.exchange)
        if self.pipeline is not None:
            scale = None if self.scaler is None else self.scaler.scale
            sums = self.pipeline.micro_step(own, loss_fn, scale, last=last)
        else:
            for groups in self.groups:
                groups[-1].set_requires_all_reduce(last)
            sums = super().micro_step(own, loss_fn, last=last)
        if last:
            self._finish_gradients()
        return self._counted_once(sums)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; collective within the replica."""
        own = own_positions(batch, self.exchange)
        return self._counted_once(super().evaluate(own) if self.pipeline is None else self.pipeline.evaluate(own))

    def _counted_once(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The `sums`, which all processes along `tp` have, on the first of them, and zeros on the others."""
        first = self.processes.index("tp") == 0
        return sums if first else {name: torch.zeros_like(value) for name, value in sums.items()}

    def _finish_gradients(self) -> None:
        """Gives each trained part its gradient, summed over all processes that have a part in it."""
        for name, value in self.sharded.items():
            if value.grad is not None:
                self.trained[name].grad, value.grad = local_values(value.grad), None
        if self.pipeline is not None and not self.groups:
            sum_and_wait(self.trainable, self.processes.group(*DATA, "sp"))
        sum_and_wait(self.in_region, self.processes.group("tp"))
        sum_and_wait(self.tied, self.ends)

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
            if name in self.first_here:
                part, axes = self.parts[name], self.alike[name]
                if value.shape != part.local_shape:  # a step count is not divided
                    part, axes = TensorPart.whole(value.shape), AXES[1:]
                shards[axes] += part.shards(key, value)
        if kind == "optimizer":
            axes = tuple(axis for axis in AXES[1:] if axis not in self.sharing)
            state = self.whole.state_shards()
            shards[axes] += [each for each in state if each.name.rpartition("/")[0] in self.first_here]
        for axes in sorted(shards):
            yield from assign_shards(shards[axes], mesh.index(*axes), mesh.size(*axes))

    def model_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and this process's part of each of `saved_values`."""
        for group in (each for groups in self.groups for each in groups):
            group.reshard()  # after a forward without a backward some weights are still gathered
        for own, value in saved_values(self.module):
            yield self.names[own], local_values(value)

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


def sum_and_wait(weights: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sums the gradients of `weights` over `group`, in one call; does nothing where it is None. torch's own function
    for that is deprecated, so the heartbeat knows this one by its name."""
    gradients = [value.grad for value in weights if value.grad is not None]
    if group is not None and gradients:
        group.allreduce_coalesced(gradients).wait()

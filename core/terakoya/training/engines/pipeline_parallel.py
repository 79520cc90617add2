"""Pipeline parallelism (torch.distributed.pipelining) as an `Engine`: the processes of a replica divide its blocks.

Stage s of `pp_size` x `pp_stages_per_process` runs on process s modulo `pp_size`, so the first and the last stage are
never on the same process. With one stage per process the schedule is 1F1B (Narayanan et al., 2019, PipeDream), with
several it is interleaved (Narayanan et al., 2021, arXiv:2104.04473). The micro-batches of a step are collected and run
in its last micro-step; neighbouring stages send hidden states and their gradients for each. Several replicas all-reduce
gradients once a step, each process with those at the same place of the other replicas. The engine needs one model whose
architecture can keep a stage's blocks (`Architecture.keep_stage_blocks`) and an objective with a single forward.

A matrix that is both embedding and vocabulary head is on the first and on the last process; its gradients are
all-reduced, so that both update it alike. Dropout is seeded for each micro-batch and stage.

Hidden states travel in float32. A schedule wants one shape, so micro-batches with fewer rows are padded with rows of
zeros. Where it wants more micro-batches than there are, empty ones travel for which nothing is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from terakoya.components import Architecture, Optimizer
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parallel import Parallel
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.ddp import DDPEngine
from terakoya.training.engines.engine import LossFn
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.pipeline_buffers import ReceivingStage
from terakoya.training.engines.pipeline_stage import KEY, MicroBatch, Stage, build_stage, dropout_generator
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.model.module_parts import named_values

log = logging.getLogger("terakoya")

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that replicas all-reduce at once; DDP's own default."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by name."""


class LocalStages(nn.Module):
    """The stages of this process: a plain module, because optimizers take the items of a ModuleList for blocks."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"stage{stage.index}", stage)


class PipelineEngine(DDPEngine):
    """An `Engine` over replicas of `parallel.pp_size` processes.

    Attributes:
        index: this process's number in its replica.
        replica_ranks: the ranks of the replica's processes.
        values: name in the root module -> each parameter and buffer of this process's stages.
        owners: name of each parameter and buffer -> number of its first process, in the root module's order.
        owned: the trainable parameters whose owner is this process.
        tied: the trainable parameters that another process holds too.
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
        micro_steps: int,
        scaler: LossScaler | None = None,
    ) -> None:
        """Keeps this process's stages of `module`, with the weights of rank 0, and builds their optimizer.

        Raises:
            UserError: there are fewer blocks than stages.
        """
        assert context.replica_group is not None, "a replica of several processes"
        self.replica_group = context.replica_group
        self.replica_ranks = context.topology.replica_ranks(context.replica)
        self.index = self.replica_ranks.index(context.rank)
        self.stage_count = len(self.replica_ranks) * parallel.pp_stages_per_process
        context.broadcast_module(module)
        names = {id(value): name for name, value in named_values(module)}
        self.stages = [
            build_stage(
                module, architectures, vocabulary,
                index=index, count=self.stage_count, device=context.device, precision=precision,
            )
            for index in range(self.index, self.stage_count, len(self.replica_ranks))
        ]  # fmt: skip
        stages = LocalStages(self.stages)
        local_names = [names[id(value)] for _, value in named_values(stages)]
        stages.to(context.device)
        self.values = dict(zip(local_names, (value for _, value in named_values(stages)), strict=True))
        super().__init__(
            context,
            stages,
            optimizer.build(stages, fused=context.device.type in ("cpu", "cuda")),
            precision="fp32",  # each stage runs autocast itself: no forward contains all stages
            max_grad_norm=max_grad_norm,
            scaler=scaler,
        )
        self.dropout_rank = context.replica
        names_by_rank = context.gather(set(local_names))
        holders = {
            name: [index for index, rank in enumerate(self.replica_ranks) if name in names_by_rank[rank]]
            for name in names.values()
        }
        self.owners = {name: indices[0] for name, indices in holders.items()}
        trained = [(name, value) for name, value in self.values.items() if value.requires_grad]
        self.owned = [value for name, value in trained if self.owners[name] == self.index]
        self.tied = [value for name, value in trained if len(holders[name]) > 1]
        self.ends = _ends_group(context, timedelta(seconds=parallel.timeout_seconds))
        self.micro_batches: list[MicroBatch] = []
        self.schedules: dict[tuple[int, int, int], Schedule1F1B | ScheduleInterleaved1F1B] = {}
        self.shapes: dict[bool, Shapes] = {}
        self._warn_if_idle(micro_steps)

    def _warn_if_idle(self, micro_steps: int) -> None:
        if micro_steps < self.stage_count and self.context.is_main:
            log.warning(
                "%s: %d stages share %d micro-batch%s in a step and are idle for most of it; a lower micro_batch_size"
                " makes more micro-batches",
                KEY, self.stage_count, micro_steps, "" if micro_steps == 1 else "es",
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- the loop

    def gradient_group(self) -> dist.ProcessGroup | None:
        """None: DDP would need one forward over all stages. Gradients are summed after the last micro-step."""
        return None

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`; the last micro-step returns the sums of all, those before it return none."""
        self.micro_batches.append(MicroBatch(batch, loss_fn, dropout_generator(self.context.device).initial_seed()))
        if not last:
            return {}
        step, self.micro_batches = self.micro_batches, []
        self._run(step)
        self._reduce()
        if not self.stages[-1].last:
            return self._on_all(None)
        sums = [micro_batch.sums for micro_batch in step]
        return self._on_all({name: torch.stack([each[name].double() for each in sums]).sum(0) for name in sums[0]})

    def _run(self, step: Sequence[MicroBatch]) -> None:
        """Runs forward and backward of all micro-batches of a `step`."""
        count = schedulable_count(len(step), processes=len(self.replica_ranks), stages=self.stage_count)
        rows, length = (max(each.shape[axis] for each in step) for axis in (0, 1))
        for stage in self.stages:
            stage.step = [*step, *[None] * (count - len(step))]
            stage.rows, stage.length = rows, length
            stage.scale = None if self.scaler is None else self.scaler.scale
        schedule = self._schedule(count, rows, length)
        numbers = torch.arange(count)  # on the host: each stage looks up its micro-batch by number
        schedule.step(target=numbers, return_outputs=False, micro=numbers)
        for stage in self.stages:
            stage.step = []

    def _schedule(self, count: int, rows: int, length: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """Returns the schedule for `count` micro-batches with hidden states (`rows`, `length`, H)."""
        key = (count, rows, length)
        if key not in self.schedules:
            stages: list[Any] = [self._pipeline_stage(stage, rows, length) for stage in self.stages]
            options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
            self.schedules[key] = (
                ScheduleInterleaved1F1B(stages, count, **options)
                if len(stages) > 1
                else Schedule1F1B(stages[0], count, **options)
            )
        return self.schedules[key]

    def _pipeline_stage(self, stage: Stage, rows: int, length: int) -> PipelineStage:
        """Wraps `stage` for torch's schedules, with the shapes of its inputs and outputs."""
        hidden = torch.empty(rows, length, stage.hidden_size, device="meta", requires_grad=True)
        return ReceivingStage(
            stage,
            stage.index,
            self.stage_count,
            self.context.device,
            input_args=() if stage.first else (hidden,),
            output_args=(torch.empty((), device="meta", requires_grad=True) if stage.last else hidden,),
            group=self.replica_group,
            shape=(rows, length, stage.hidden_size),
        )

    def _reduce(self) -> None:
        """All-reduces gradients over replicas, then those of a tied matrix over the first and the last process."""
        if self.context.data_parallel_group is not None:
            for bucket in _buckets([value.grad for value in self.trainable if value.grad is not None]):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat, group=self.context.data_parallel_group)
                for gradient, total in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        for value in self.tied:
            dist.all_reduce(value.grad, group=self.ends)

    def clip(self) -> Tensor:
        """See `DDPEngine`; the norm is that of all stages, with a tied matrix counted once. All processes sum in the
        same order, so that rounding is the same."""
        gradients = [value.grad for value in self.owned if value.grad is not None]
        local = torch.zeros((), dtype=torch.float64, device=self.context.device)
        if gradients:
            local += nn.utils.get_total_norm(gradients, foreach=True).double().square()
        squares = [torch.empty_like(local) for _ in self.replica_ranks]
        dist.all_gather(squares, local, group=self.replica_group)
        norm = torch.stack(squares).sum().sqrt().float()
        nn.utils.clip_grads_with_norm_(self.trainable, self.max_grad_norm or float("inf"), norm, foreach=True)
        return norm

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`: one stage after another, forward only; collective within the replica."""
        rows, length = batch["input_ids"].shape
        sums: Mapping[str, Tensor] | None = None
        with torch.no_grad():
            for stage in self.stages:
                hidden = None
                if not stage.first:
                    hidden = torch.empty(rows, length, stage.hidden_size, device=self.context.device)
                    dist.recv(hidden, src=self._rank_of(stage.index - 1), group=self.replica_group)
                output = stage.run(batch, hidden)
                if isinstance(output, Tensor):
                    dist.send(output.contiguous(), dst=self._rank_of(stage.index + 1), group=self.replica_group)
                else:
                    sums = output
        return self._on_all(sums)

    def _rank_of(self, stage: int) -> int:
        """The rank that runs stage `stage` of this replica."""
        return self.replica_ranks[stage % len(self.replica_ranks)]

    def _on_all(self, sums: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Returns `sums` on the last process, which computed them, and zeros under the same names on the others. Names
        and shapes are broadcast the first time."""
        mode = self.module.training
        if mode not in self.shapes:
            shapes: list[Any] = [None if sums is None else {name: tuple(value.shape) for name, value in sums.items()}]
            dist.broadcast_object_list(shapes, src=self.replica_ranks[-1], group=self.replica_group)
            self.shapes[mode] = shapes[0]
        if sums is not None:
            return sums
        return {name: torch.zeros(shape, device=self.context.device) for name, shape in self.shapes[mode].items()}

    # --------------------------------------------------------------------------------------------- checkpoints

    def weight_shards(self) -> list[TensorShard]:
        """See `Engine`; of several replicas the first."""
        mine = self.values.items() if self.context.replica == 0 else ()
        return [
            whole_shard(name, value.detach())
            for name, value in mine
            if value.requires_grad and self.owners[name] == self.index
        ]

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. A tied matrix is the first process's; equal stages of several replicas share the writing."""
        values = self.model_state() if kind == "model" else self.optimizer_state()
        owned = [
            whole_shard(name, value)
            for name, value in values
            if self.owners[name if kind == "model" else name.rpartition("/")[0]] == self.index
        ]
        yield from assign_shards(owned, self.context.replica, self.context.topology.num_replicas)

    def model_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of each parameter and buffer of this process's stages."""
        yield from self.values.items()

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`; each process reads what its stages hold."""
        with torch.no_grad():
            for name, value in self.values.items():
                value.copy_(values(name))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `DDPEngine`."""
        for name, value in self.values.items():
            if isinstance(value, nn.Parameter):
                yield name, value


def schedulable_count(micro_batches: int, *, processes: int, stages: int) -> int:
    """The smallest number of micro-batches, at least `micro_batches`, that the schedule accepts: 1F1B takes no fewer
    than `stages`, the interleaved schedule equally many in each of its rounds."""
    if stages == processes:
        return max(micro_batches, stages)
    count = micro_batches
    while count % max(1, count // processes):
        count += 1
    return count


def _ends_group(context: DistributedContext, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group of the first and the last process of this process's replica; None on those in between. Collective:
    every process creates the group of every replica."""
    own = None
    for replica in range(context.topology.num_replicas):
        members = context.topology.replica_ranks(replica)
        ends = [members[0], members[-1]]
        group = dist.new_group(ends, timeout=timeout)
        own = group if context.rank in ends else own
    return own


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields `gradients` in groups of at most `BUCKET_BYTES`; a larger gradient is a group of its own."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        bytes_ = gradient.numel() * gradient.element_size()
        if bucket and size + bytes_ > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += bytes_
    if bucket:
        yield bucket

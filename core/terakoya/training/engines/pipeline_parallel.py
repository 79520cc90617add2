"""Pipeline parallelism (torch.distributed.pipelining) as an `Engine`: the processes of a replica share its blocks.

Stage s of `pp_size` x `pp_stages_per_process` lies on process s modulo `pp_size`, so first and last never on the same.
With one stage each the schedule is 1F1B (Narayanan et al., 2019, PipeDream), with several it is interleaved (Narayanan
et al., 2021, arXiv:2104.04473). A step's micro-batches are collected and run with the last of them. Several replicas
add up their gradients once a step, each process with those at its place.

A matrix that embeds words and makes logits lies on the first and on the last process; its gradients are added up, so
that both update it alike. Each process has dropout of its own: it is seeded for each micro-batch and stage.

Hidden states travel in float32, micro-batches of fewer rows with rows of zeros behind them, as a schedule wants one
shape. Where it wants more micro-batches than there are, empty ones travel for which nothing is computed.
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

from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
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
"""How many bytes of gradients replicas add up at once; DDP's own default."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by name."""


class Stages(nn.Module):
    """The stages of this process: a plain module and no list of modules, which optimizers take for blocks."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"stage{stage.index}", stage)


class PipelineEngine(DDPEngine):
    """An `Engine` over replicas of `parallel.pp_size` processes.

    Attributes:
        place: which of its replica's processes this is.
        own: the parameters and buffers of this process's stages, by their names in the root module.
        owners: name of each parameter and buffer -> the first place that has it, in the root module's order.
        counted: the trainable parameters whose owner this process is.
        tied: those that another place has too.
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
        micro_steps: int,
    ) -> None:
        """Cuts `module`, of which rank 0's weights count, and builds the optimizer of its own part.

        Raises:
            UserError: there are fewer blocks than stages.
        """
        assert context.replica_group is not None, "a replica of several processes"
        self.within = context.replica_group
        self.members = context.topology.replica_ranks(context.replica)
        self.place = self.members.index(context.rank)
        self.count = len(self.members) * parameters.parallel.pp_stages_per_process
        context.broadcast_module(module)
        names = {id(value): name for name, value in named_values(module)}
        self.stages = [
            build_stage(module, parameters, vocabulary, index=index, count=self.count, device=context.device)
            for index in range(self.place, self.count, len(self.members))
        ]
        stages = Stages(self.stages)
        held = [names[id(value)] for _, value in named_values(stages)]
        stages.to(context.device)
        self.own = dict(zip(held, (value for _, value in named_values(stages)), strict=True))
        super().__init__(
            context,
            stages,
            parameters.optimizer.build(stages, fused=context.device.type in ("cpu", "cuda")),
            precision="fp32",  # stages see to it themselves, as nothing calls them all together
            max_grad_norm=parameters.max_grad_norm,
            scaler=scaler,
        )
        self.dropout_rank = context.replica
        everywhere = context.gather(set(held))
        places = {
            name: [place for place, rank in enumerate(self.members) if name in everywhere[rank]]
            for name in names.values()
        }
        self.owners = {name: found[0] for name, found in places.items()}
        trained = [(name, value) for name, value in self.own.items() if value.requires_grad]
        self.counted = [value for name, value in trained if self.owners[name] == self.place]
        self.tied = [value for name, value in trained if len(places[name]) > 1]
        self.ends = _ends(context, timedelta(seconds=parameters.parallel.timeout_seconds))
        self.waiting: list[MicroBatch] = []
        self.schedules: dict[tuple[int, int, int], Schedule1F1B | ScheduleInterleaved1F1B] = {}
        self.shapes: dict[bool, Shapes] = {}
        self._warn(micro_steps)

    def _warn(self, micro_steps: int) -> None:
        if micro_steps < self.count and self.context.is_main:
            log.warning(
                "%s: %d stages have %d micro-batch%s in a step, and stand idle for most of it; a lower micro_batch_size"
                " makes more",
                KEY, self.count, micro_steps, "" if micro_steps == 1 else "es",
            )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- the loop

    def reducing(self) -> dist.ProcessGroup | None:
        """Nobody through DDP: stages have no forward of theirs together; gradients are added up after the last."""
        return None

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`; the sums of all micro-steps come with the last, those before it return none."""
        self.waiting.append(MicroBatch(batch, loss_fn, dropout_generator(self.context.device).initial_seed()))
        if not last:
            return {}
        step, self.waiting = self.waiting, []
        self._run(step)
        self._reduce()
        made = [each.sums for each in step]
        if not self.stages[-1].last:
            return self._everywhere(None)
        return self._everywhere({name: torch.stack([sums[name].double() for sums in made]).sum(0) for name in made[0]})

    def _run(self, step: Sequence[MicroBatch]) -> None:
        """Forward and backward of all micro-batches of a `step`."""
        count = schedulable_count(len(step), processes=len(self.members), stages=self.count)
        rows, length = (max(each.shape[axis] for each in step) for axis in (0, 1))
        for stage in self.stages:
            stage.step = [*step, *[None] * (count - len(step))]
            stage.rows, stage.length = rows, length
            stage.scale = None if self.scaler is None else self.scaler.scale
        schedule = self._schedule(count, rows, length)
        numbers = torch.arange(count)  # on the host: each stage looks its micro-batch up
        schedule.step(target=numbers, return_outputs=False, micro=numbers)
        for stage in self.stages:
            stage.step = []

    def _schedule(self, count: int, rows: int, length: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
        """The schedule of `count` micro-batches whose hidden states are (`rows`, `length`, H)."""
        key = (count, rows, length)
        if key not in self.schedules:
            built: list[Any] = [self._pipeline_stage(stage, rows, length) for stage in self.stages]
            given: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
            self.schedules[key] = (
                ScheduleInterleaved1F1B(built, count, **given)
                if len(built) > 1
                else Schedule1F1B(built[0], count, **given)
            )
        return self.schedules[key]

    def _pipeline_stage(self, stage: Stage, rows: int, length: int) -> PipelineStage:
        """`stage` as torch's schedules know it, with the shapes that go in and come out."""
        travels = torch.empty(rows, length, stage.hidden_size, device="meta", requires_grad=True)
        return ReceivingStage(
            stage,
            stage.index,
            self.count,
            self.context.device,
            input_args=() if stage.first else (travels,),
            output_args=(torch.empty((), device="meta", requires_grad=True) if stage.last else travels,),
            group=self.within,
            shape=(rows, length, stage.hidden_size),
        )

    def _reduce(self) -> None:
        """Adds gradients up over replicas, then those of a tied matrix over the first and the last process."""
        if self.context.data_parallel_group is not None:
            for bucket in _buckets([value.grad for value in self.trainable if value.grad is not None]):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat, group=self.context.data_parallel_group)
                for gradient, total in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        for value in self.tied:
            dist.all_reduce(value.grad, group=self.ends)

    def clip(self) -> Tensor:
        """See `DDPEngine`; the norm is that of all stages, a tied matrix counted once. It is added up in the same order
        by all, so that no rounding parts them."""
        gradients = [value.grad for value in self.counted if value.grad is not None]
        mine = torch.zeros((), dtype=torch.float64, device=self.context.device)
        if gradients:
            mine += nn.utils.get_total_norm(gradients, foreach=True).double().square()
        squares = [torch.empty_like(mine) for _ in self.members]
        dist.all_gather(squares, mine, group=self.within)
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
                    dist.recv(hidden, src=self._rank_of(stage.index - 1), group=self.within)
                made = stage.run(batch, hidden)
                if isinstance(made, Tensor):
                    dist.send(made.contiguous(), dst=self._rank_of(stage.index + 1), group=self.within)
                else:
                    sums = made
        return self._everywhere(sums)

    def _rank_of(self, stage: int) -> int:
        """The rank that the stage number `stage` of this replica lies on."""
        return self.members[stage % len(self.members)]

    def _everywhere(self, sums: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """The last process's `sums` there, zeros under the same names on the others; how they are called is told the
        first time."""
        mode = self.module.training
        if mode not in self.shapes:
            told: list[Any] = [None if sums is None else {name: tuple(value.shape) for name, value in sums.items()}]
            dist.broadcast_object_list(told, src=self.members[-1], group=self.within)
            self.shapes[mode] = told[0]
        if sums is not None:
            return sums
        return {name: torch.zeros(shape, device=self.context.device) for name, shape in self.shapes[mode].items()}

    # --------------------------------------------------------------------------------------------- checkpoints

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. What lies on both ends is the first's; same stages of several replicas share the writing."""
        values = self.parameters() if kind == "model" else self.optimizer_state()
        mine = [
            whole_shard(name, value)
            for name, value in values
            if self.owners[name if kind == "model" else name.rpartition("/")[0]] == self.place
        ]
        yield from assign_shards(mine, self.context.replica, self.context.topology.num_replicas)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each parameter and buffer of this process's stages."""
        yield from self.own.items()

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`; each process reads its own."""
        with torch.no_grad():
            for name, value in self.own.items():
                value.copy_(values(name))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `DDPEngine`."""
        for name, value in self.own.items():
            if isinstance(value, nn.Parameter):
                yield name, value


def schedulable_count(micro_batches: int, *, processes: int, stages: int) -> int:
    """How many micro-batches a schedule can take, at least as many as there are: 1F1B no fewer than stages, interleaved
    as many in each of its rounds."""
    if stages == processes:
        return max(micro_batches, stages)
    count = micro_batches
    while count % max(1, count // processes):
        count += 1
    return count


def _ends(context: DistributedContext, timeout: timedelta) -> dist.ProcessGroup | None:
    """The first and the last process of this one's replica; None on those between. Every process makes every group."""
    mine = None
    for replica in range(context.topology.num_replicas):
        members = context.topology.replica_ranks(replica)
        ends = [members[0], members[-1]]
        group = dist.new_group(ends, timeout=timeout)
        mine = group if context.rank in ends else mine
    return mine


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`gradients` in runs of at most `BUCKET_BYTES`, larger ones alone."""
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

"""Runs a pipeline's stages (torch.distributed.pipelining): the processes of a replica divide its blocks.

Stage s of `pp_size` x `pp_stages_per_process` runs on process s modulo `pp_size`, so the first and the last stage are
never on the same process. With one stage per process the schedule is 1F1B (Narayanan et al., 2019, PipeDream), with
several it is interleaved (Narayanan et al., 2021, arXiv:2104.04473). With `"pp_schedule": "zero_bubble"` it is ZB1P (Qi
et al., 2023, arXiv:2401.10241). The micro-batches of a step are collected and run in its last micro-step; neighbouring
stages send hidden states and their gradients for each. An architecture must be able to keep a stage's blocks
(`Architecture.keep_stage_blocks`), and an objective have a single forward. Dropout is seeded for each micro-batch and
stage.

Hidden states travel in float32. A schedule wants one shape, so micro-batches with fewer rows are padded with rows of
zeros. Where it wants more micro-batches than there are, empty ones travel for which nothing is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from terakoya.training.engines.engine import LossFn
from terakoya_parallel.pipeline_stage import KEY, MicroBatch, ReceivingStage, Stage
from terakoya_parallel.tensor_layers import dropout_generator

log = logging.getLogger("terakoya")

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by name."""
Schedule = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble | ScheduleLoopedBFS


class Pipeline:
    """The pipeline of a replica, seen from one of its processes."""

    def __init__(
        self, stages: Sequence[Stage], group: dist.ProcessGroup, *, zero_bubble: bool, micro_steps: int
    ) -> None:
        """`stages` are those of this process, one of `group`; `micro_steps` is the number of micro-batches in a
        step."""
        self.stages = stages
        self.group = group
        self.processes = dist.get_world_size(group)
        self.count = len(stages) * self.processes
        self.device = stages[0].device
        if micro_steps < self.count and dist.get_rank() == 0:
            log.warning(
                "%s: %d stages share %d micro-batch%s in a step and are idle for most of it; a lower micro_batch_size"
                " makes more micro-batches",
                KEY, self.count, micro_steps, "" if micro_steps == 1 else "es",
            )  # fmt: skip
        self.kind: type[Schedule] = Schedule1F1B if len(stages) == 1 else ScheduleInterleaved1F1B
        if zero_bubble:
            self.kind = ScheduleInterleavedZeroBubble
        self.micro_batches: list[MicroBatch] = []
        self.schedules: dict[tuple[type[Schedule], int, int, int], Schedule] = {}
        self.shapes: dict[bool, Shapes] = {}

    def micro_step(
        self, batch: Mapping[str, Tensor], loss_fn: LossFn, scale: Tensor | None, *, last: bool
    ) -> Mapping[str, Tensor]:
        """See `Engine`; the last micro-step returns the sums of all, those before it return none. Gradients stay in
        this process. The loss is multiplied by `scale`, ()."""
        self.micro_batches.append(MicroBatch(batch, loss_fn, dropout_generator(self.device).initial_seed()))
        if not last:
            return {}
        step, self.micro_batches = self.micro_batches, []
        count = schedulable_count(len(step), processes=self.processes, in_rounds=self.kind is not Schedule1F1B)
        self._run([*step, *[None] * (count - len(step))], self.kind, scale)
        sums = [micro_batch.sums for micro_batch in step]
        return self._on_all({name: torch.stack([each[name].double() for each in sums]).sum(0) for name in sums[0]})

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; collective within the replica."""
        micro_batch = MicroBatch(batch, lambda sums: torch.zeros((), device=self.device), 0)
        with torch.no_grad():
            self._run([micro_batch], ScheduleLoopedBFS)
        return self._on_all(micro_batch.sums)

    def _run(self, step: Sequence[MicroBatch | None], kind: type[Schedule], scale: Tensor | None = None) -> None:
        """Runs the micro-batches of a `step` through all stages by a schedule of this `kind`."""
        shapes = [each.tensors["input_ids"].shape for each in step if each is not None]
        rows, length = (max((shape[axis] for shape in shapes), default=0) for axis in (0, 1))
        for stage in self.stages:
            stage.step, stage.rows, stage.length, stage.scale = step, rows, length, scale
        key = (kind, len(step), rows, length)
        if key not in self.schedules:
            stages: Any = [ReceivingStage(stage, self.count, rows, length, self.group) for stage in self.stages]
            if kind is Schedule1F1B:
                (stages,) = stages
            self.schedules[key] = kind(stages, len(step), loss_fn=lambda loss, _: loss, scale_grads=False)
        schedule = self.schedules[key]
        run = schedule.eval if kind is ScheduleLoopedBFS else schedule.step
        run(target=torch.arange(len(step)), return_outputs=False)
        for stage in self.stages:
            stage.step = []

    def _on_all(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns `sums` on the last process, which computed them, and zeros under the same names on the others, which
        have none. Names and shapes are broadcast the first time."""
        mode = self.stages[0].training
        if mode not in self.shapes:
            shapes: list[Any] = [{name: tuple(value.shape) for name, value in sums.items()}]
            dist.broadcast_object_list(shapes, group=self.group, group_src=self.processes - 1)
            self.shapes[mode] = shapes[0]
        return sums or {name: torch.zeros(shape, device=self.device) for name, shape in self.shapes[mode].items()}


def schedulable_count(micro_batches: int, *, processes: int, in_rounds: bool) -> int:
    """The smallest number of micro-batches, at least `micro_batches`, that the schedule accepts: 1F1B with one stage on
    each of `processes` takes no fewer than these; a schedule that runs `in_rounds` equally many in each round."""
    if not in_rounds:
        return max(micro_batches, processes)
    count = micro_batches
    while count % max(1, count // processes):
        count += 1
    return count

"""Stages of a pipeline: each stage is a range of neighbouring blocks of a model, with everything before the first block
or after the last.

A stage is a copy of the whole root module in which the architecture keeps only this stage's parts
(`Architecture.keep_stage_blocks`). The model's own forward runs it, masks and positions included. Every stage has the
micro-batch itself; only hidden states are sent, by torch's schedules.

Letters: B rows of a micro-batch, T positions, H hidden size; R rows of hidden states that are sent, the same for all
micro-batches of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.distributed.topology import split_evenly
from terakoya.errors import UserError
from terakoya.toolkit.random_keys import torch_seed
from terakoya.training.engines.engine import LossFn, autocast_dtype
from terakoya.training.model.module_parts import architecture_of, top_level_models
from terakoya_parallel.tensor_layers import dropout_generator

KEY = "parallel.pp_size"


@dataclass
class MicroBatch:
    """One micro-batch of a step, until the schedule has run it through all stages.

    Attributes:
        tensors: the batch, arrays (B, T) and others.
        loss_fn: maps its sums to the scalar loss to differentiate.
        seed: the dropout seed at the time of its `micro_step`.
        sums: the last stage's sums, detached; empty on other stages.
    """

    tensors: Mapping[str, Tensor]
    loss_fn: LossFn
    seed: int
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class Stage(nn.Module):
    """Stage `index` of `count`: one of `count` nearly equal ranges of the blocks of the root `module`, with which it
    shares weights.

    Attributes:
        root: the objective's module over this stage's part of its model.
        step: the micro-batches of the current step; None is an empty one, where the schedule needs more than there are.
        number: the micro-batch that runs next.
        rows, length: R and T of the hidden states that are sent.
        scale: factor of the loss, () float32; None is 1.
    """

    def __init__(
        self,
        module: nn.Module,
        architectures: Sequence[Architecture],
        vocabulary: Vocabulary,
        *,
        index: int,
        count: int,
        device: torch.device,
        precision: str,
    ) -> None:
        """Keeps the blocks of the stage.

        Raises:
            UserError: there are fewer blocks than stages, or one has nothing to train.
        """
        super().__init__()
        shared = {id(value): value for value in [*module.parameters(), *module.buffers()]}
        self.root = copy.deepcopy(module, shared)
        (model,) = top_level_models(self.root)
        architecture = architecture_of(model, architectures, vocabulary, key=KEY)
        blocks = architecture.blocks(model)
        _check_blocks(type(model).__name__, blocks, count)
        architecture.keep_stage_blocks(model, range(*split_evenly(len(blocks), count, index)))
        self.hidden = partial(architecture.hidden, model)  # a partial: registers no second model
        self.index = index
        self.first, self.last = index == 0, index == count - 1
        self.device = device
        self.autocast_dtype = autocast_dtype(precision)
        self.hidden_size: int = model.config.hidden_size
        self.step: Sequence[MicroBatch | None] = []
        self.number = 0
        self.rows = 0
        self.length = 0
        self.scale: Tensor | None = None

    def forward(self, *received: Tensor) -> Tensor:
        """Runs a micro-batch: returns hidden states (R, T, H) float32, or on the last stage this micro-batch's part of
        the loss, (). `received` is the output of the stage before, empty on the first stage."""
        micro_batch = self.step[self.number]
        hidden = received[0] if received else None
        if micro_batch is None:
            return self._empty_output(hidden)
        # seeded for the micro-batch and this stage, so that the order of the schedule does not matter
        dropout_generator(self.device).manual_seed(torch_seed(micro_batch.seed, "stage", self.index))
        inputs = micro_batch.tensors
        rows = len(inputs["input_ids"])
        if hidden is not None:  # no slice of all rows: its gradient would be a copy
            inputs = {**inputs, "inputs_embeds": hidden if rows == self.rows else hidden[:rows]}
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            if not self.last:
                output = self.hidden(inputs).float()
                if output._is_view():  # torch detaches it in place once a backward is split, which no view allows
                    output = output.clone()
                missing = self.rows - rows
                return F.pad(output, (0, 0, 0, 0, 0, missing)) if missing else output  # without rows it would copy
            sums = self.root(inputs)
        micro_batch.sums = {name: value.detach() for name, value in sums.items()}
        loss = micro_batch.loss_fn(sums)
        return loss if self.scale is None else loss * self.scale

    def _empty_output(self, hidden: Tensor | None) -> Tensor:
        """The output for an empty micro-batch; no weight takes part in it."""
        if hidden is None:
            shape = (self.rows, self.length, self.hidden_size)
            return torch.zeros(shape, device=self.device, requires_grad=True)
        return hidden.sum() * 0.0 if self.last else hidden.clone()


def _check_blocks(name: str, blocks: Sequence[nn.Module], count: int) -> None:
    """Raises UserError, on every process, if one of `count` stages has none of the `blocks` of the model `name`, or
    nothing to train in them."""
    if len(blocks) < count:  # config/conflicts.py has checked architectures whose depth is a setting
        raise UserError(f"{KEY}: expected at most {len(blocks)} stages, as many as {name} has blocks")
    for index in range(count):
        first, last = split_evenly(len(blocks), count, index)
        if not any(value.requires_grad for block in blocks[first:last] for value in block.parameters()):
            raise UserError(
                f"{KEY}: stage {index + 1} of {count} has nothing to train in its blocks, {first} to {last - 1} of "
                f"{name}; name layers of all blocks in lora.target_modules, or set it to 1"
            )


class ReceivingStage(PipelineStage):
    """torch's stage `stage` of `count`, with receive buffers that exist only while they are needed. It receives hidden
    states (`rows`, `length`, H), and gradients of those that it sent, float32.

    torch allocates buffers for every micro-batch of a step, in both directions, and keeps them: with hundreds of
    micro-batches they take more memory than the activations. Here a buffer is allocated when a receive begins and freed
    after the micro-batch's backward.
    """

    def __init__(self, stage: Stage, count: int, rows: int, length: int, group: dist.ProcessGroup) -> None:
        self.shape = (rows, length, stage.hidden_size)
        hidden, loss = (torch.empty(shape, device="meta", requires_grad=True) for shape in (self.shape, ()))
        super().__init__(
            stage,
            stage.index,
            count,
            stage.device,
            input_args=() if stage.first else (hidden,),  # given, so that torch need not find shapes in a trial run
            output_args=(loss if stage.last else hidden,),
            group=group,
        )
        self.args_recv_info, self.grad_recv_info = _ReceiveInfos(), _ReceiveInfos()

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """See `PipelineStage`; tells the module which micro-batch it is."""
        self.submod.number = fwd_chunk_id  # type: ignore[assignment]
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[dist.P2POp]:
        """See `PipelineStage`; allocates the buffers."""
        for info in recv_infos:
            info.buffer = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        """See `PipelineStage`; frees the buffers."""
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        for infos in (self.args_recv_info, self.grad_recv_info):
            _free_buffers(infos.get(bwd_chunk_id, ()))
        if self.has_backward:
            # torch sends the gradient as it comes, and from a backward without weights it may come as a view
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
            )


class _ReceiveInfos(dict[int, Any]):
    """What torch keeps of the tensors that a stage receives, by micro-batch: without the buffers that it allocates."""

    def __setitem__(self, micro_batch: int, infos: Any) -> None:
        _free_buffers(infos)
        super().__setitem__(micro_batch, infos)


def _free_buffers(infos: Iterable[Any]) -> None:
    for info in infos:
        info.buffer = None

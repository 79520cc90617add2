"""torch DistributedDataParallel as an `Engine`: what other engines of torch's build on."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from terakoya.training.distributed.context import DistributedContext
from terakoya.training.engines.engine import LossFn, autocast_forward
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.model.module_parts import saved_values

BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the second is the first's name before torch 2.13
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""DDP's switch for sending buffers around before each forward: no model here changes its buffers in training."""


def sum_gradients(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's reduction as a plain sum over `group`: losses are already shares of a global mean.

    DDP's own divides by the number of ranks, by a product before its buckets and the gradients share memory and by a
    quotient after: for three ranks these round differently, and a resumed run would leave the straight one's path.
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


class DDPEngine:
    """torch DistributedDataParallel, or the bare module where there is one process.

    What replicas of several processes need differs in `reducing` (who adds gradients up) and `clip`. Where DDP does,
    `micro_steps` is how many micro-steps an optimizer step has.
    """

    full_module = True

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str,
        max_grad_norm: float,
        scaler: LossScaler | None = None,
        micro_steps: int = 1,
    ) -> None:
        self.module = module.to(context.device)
        self.scaler = scaler
        self.optimizer = optimizer
        self.context = context
        self.max_grad_norm = max_grad_norm
        self.dropout_rank = context.rank
        self.micro_steps = micro_steps
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        autocast_forward(self.module, context.device, precision)
        self.wrapped: nn.Module = self.module
        group = self.reducing()
        if group is not None:
            buffers_stay: dict[str, Any] = {BUFFERS_OPTION: False}
            self.wrapped = DistributedDataParallel(
                self.module,
                device_ids=[context.device.index] if context.device.type == "cuda" else None,
                process_group=group,
                gradient_as_bucket_view=True,
                **buffers_stay,
            )
            self.wrapped.register_comm_hook(None, lambda _, bucket: sum_gradients(group, bucket))
        self.fused = bool(optimizer.defaults.get("fused"))  # all of it; an optimizer made of several may be in part

    @property
    def uses_ddp(self) -> bool:
        """Whether DDP adds gradients up, in buckets of its own."""
        return self.wrapped is not self.module

    def reducing(self) -> dist.ProcessGroup | None:
        """The processes whose gradients are added up; None where this one has nobody to add to."""
        return self.context.data_parallel_group

    def clip(self) -> Tensor:
        """Scales gradients down to `max_grad_norm`; returns their norm before, a float32 scalar on the device."""
        return nn.utils.clip_grad_norm_(self.trainable, self.max_grad_norm or float("inf"), foreach=True)

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`."""
        at_once = last or not self.uses_ddp
        with contextlib.nullcontext() if at_once else self.wrapped.no_sync():  # type: ignore[operator]
            sums = self.wrapped(batch)
            loss = loss_fn(sums)
            (loss if self.scaler is None else loss * self.scaler.scale).backward()
        return {name: value.detach() for name, value in sums.items()}

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; bypasses DDP, which has nothing to reduce."""
        with torch.no_grad():
            return self.module(batch)

    def step(self, learning_rate: float) -> Tensor:
        """See `Engine`."""
        if self.scaler is not None:
            self.scaler.unscale(self.trainable)
        norm = self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.context.device.type == "cpu" or not self.fused:
            if torch.isfinite(norm):
                self.optimizer.step()
        else:
            # fused kernels look at `found_inf` on the device, so the host need not wait to skip a step
            self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        self.clear_gradients()
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def clear_gradients(self) -> None:
        """Makes ready for a step's first micro-step.

        Gradients of micro-steps that DDP takes no part in are added up where they lie: in its buckets, if they stay
        there as zeros, else in as much memory again. With one micro-step DDP puts them there; zeros would cost a pass.
        """
        self.optimizer.zero_grad(set_to_none=not (self.uses_ddp and self.micro_steps > 1))

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Every process has whole values, its own or gathered: they are dealt."""
        values = self.parameters() if kind == "model" else self.optimizer_state()
        yield from assign_shards(starmap(whole_shard, values), self.context.rank, self.context.world_size)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole fp32 value of each parameter and buffer of `saved_values`, one at a time; collective."""
        yield from saved_values(self.module)

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        """See `Engine`."""
        with torch.no_grad():
            for name, value in saved_values(self.module):
                value.copy_(values(name))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter that this process has, with its name in the root module."""
        yield from self.module.named_parameters()

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """`parameter_name/state_name` and its whole value, one at a time; collective."""
        for name, parameter in self.named_parameters():
            for state, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}/{state}", value

    def load_optimizer_state(self, values: Callable[[str], Tensor], names: frozenset[str]) -> None:
        """See `Engine`."""
        fused = {each for group in self.optimizer.param_groups if group.get("fused") for each in group["params"]}
        for name, parameter in self.named_parameters():
            # sorted: a set's order is each process's own, and all deal their parts of a checkpoint by this one
            states = {key.rpartition("/")[2]: key for key in sorted(names) if key.rpartition("/")[0] == name}
            if not states or not parameter.requires_grad:
                continue
            on_device = parameter in fused or parameter.device.type == "cpu"
            self.optimizer.state[parameter] = {
                state: values(key).to(parameter.device if state != "step" or on_device else "cpu", copy=True)
                for state, key in states.items()
            }

"""torch DistributedDataParallel as an `Engine`, and the base of the other engines that build on plain torch.

DDP shards nothing: every process holds all weights, gradients and optimizer state. Processes communicate once a step,
in the last micro-step's backward, where gradients are all-reduced in buckets. The module may be any `nn.Module`.

See docs/design/ddp.md.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from terakoya.components import Copies
from terakoya.distributed.context import DistributedContext
from terakoya.training.engines.engine import LossFn, autocast_forward, may_update
from terakoya.training.engines.learning_rates import set_learning_rate
from terakoya.training.engines.loss_scaling import LossScaler
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard
from terakoya.training.model.module_parts import saved_values

BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the option's names from torch 2.13 on, and before
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""DDP's option to broadcast buffers before each forward: no model here changes its buffers in training."""


def sum_gradients(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduces a DDP `bucket` as a plain sum over `group`: losses are already parts of a global mean.

    DDP's own reduction divides by the number of ranks, as a product before its buckets and the gradients share memory
    and as a quotient afterwards. For three ranks these round differently, so a resumed run would diverge from an
    uninterrupted one.
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def gradient_divisor(norm: Tensor, max_grad_norm: float) -> Tensor:
    """Returns what gradients of `norm` are divided by so that it is at most `max_grad_norm`, as torch's
    `clip_grad_norm_` multiplies them by the reciprocal."""
    return ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)


@dataclass(frozen=True)
class StepOptions:
    """How an engine takes a step.

    Attributes:
        precision: of the forward, as the key of parameters.
        max_grad_norm: gradients are scaled down to it; 0 leaves them.
        scaler: scales losses in fp16.
        micro_steps: the number of micro-steps in an optimizer step.
        cuda_graphs: whether the module's compiled forward and backward are recorded: their results lie in memory of the
            graphs, which the next micro-step writes over.
        recomputes: whether blocks compute in the backward what they computed before.
    """

    precision: str = "fp32"
    max_grad_norm: float = 0.0
    scaler: LossScaler | None = None
    micro_steps: int = 1
    cuda_graphs: bool = False
    recomputes: bool = False


class DDPEngine:
    """torch DistributedDataParallel, or the bare module where there is one process.

    Subclasses override `gradient_group` (the group in which DDP sums gradients) and `clip`.

    Attributes:
        copies: what layers read in the place of weights, see `components.module_transform`.
        kept: the parameters whose gradients stay from step to step, and are set to 0.
    """

    full_module = True

    def __init__(
        self,
        context: DistributedContext,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: StepOptions = StepOptions(),
    ) -> None:
        self.module = module.to(context.device)
        self.scaler = options.scaler
        self.optimizer = optimizer
        self.context = context
        self.max_grad_norm = options.max_grad_norm
        self.dropout_rank = context.rank
        self.micro_steps = options.micro_steps
        self.cuda_graphs, self.recomputes = options.cuda_graphs, options.recomputes
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        autocast_forward(self.module, context.device, options.precision)
        self.wrapped: nn.Module = self.module
        group = self.gradient_group()
        if group is not None:
            no_buffer_sync: dict[str, Any] = {BUFFERS_OPTION: False}
            self.wrapped = DistributedDataParallel(
                self.module,
                device_ids=[context.device.index] if context.device.type == "cuda" else None,
                process_group=group,
                gradient_as_bucket_view=True,
                **no_buffer_sync,
            )
            self.wrapped.register_comm_hook(None, lambda _, bucket: sum_gradients(group, bucket))
        self.copies: Sequence[Copies] = ()
        self.kept: list[nn.Parameter] = []
        self._keep_gradients()
        # whether the optimizer skips a step by itself, where `found_inf` on the device says so; torch's name for it
        self.skips_steps = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def keep_up_to_date(self, copies: Sequence[Copies]) -> None:
        """Refreshes `copies` from here on whenever weights change."""
        self.copies = copies
        self._keep_gradients()

    def _keep_gradients(self) -> None:
        """Makes the gradients that outlive a micro-step where others add to them: CUDA graphs, whose own memory is
        written over, or products of layers with copies. What a compiled block computes again must be as it was, so that
        with recomputation autograd adds."""
        if self.micro_steps > 1 and self.cuda_graphs:
            self.kept = self.trainable
        elif self.micro_steps > 1 and not self.recomputes:
            self.kept = [value for each in self.copies for value in each.add_in_products(self.module)]
        self.renew_gradients()

    def renew_gradients(self) -> None:
        """Frees all gradients, and makes those again that are kept."""
        self.optimizer.zero_grad()
        for parameter in self.kept:
            parameter.grad = torch.zeros_like(parameter)

    @property
    def uses_ddp(self) -> bool:
        """Whether DDP sums gradients, in its own buckets."""
        return self.wrapped is not self.module

    def gradient_group(self) -> dist.ProcessGroup | None:
        """The processes over which DDP sums gradients; None where it has nothing to sum."""
        return dist.group.WORLD if self.context.world_size > 1 else None

    def clip(self) -> Tensor:
        """Scales gradients down to `max_grad_norm`; returns the norm before, a float32 scalar on the device."""
        return nn.utils.clip_grad_norm_(self.trainable, self.max_grad_norm or float("inf"), foreach=True)

    @property
    def clips_in_update(self) -> bool:
        """Whether the update itself scales gradients down, without a pass of its own: torch's AdamW on a GPU, in one
        kernel, divides them by `grad_scale`."""
        optimizer = self.optimizer
        return (
            self.context.device.type == "cuda"
            and type(self).clip is DDPEngine.clip
            and type(optimizer) is torch.optim.AdamW
            and all(group.get("fused") for group in optimizer.param_groups)
        )

    def clip_in_update(self) -> Tensor:
        """Has the next update do what `clip` does; returns the same."""
        gradients = [parameter.grad for parameter in self.trainable if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        divisor = gradient_divisor(norm, self.max_grad_norm) if self.max_grad_norm else None
        self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]  # torch's name
        return norm

    def micro_step(self, batch: Mapping[str, Tensor], loss_fn: LossFn, *, last: bool) -> Mapping[str, Tensor]:
        self._begin_graphs()
        sync = last or not self.uses_ddp
        with contextlib.nullcontext() if sync else self.wrapped.no_sync():  # type: ignore[operator]
            sums = self.wrapped(batch)
            loss = loss_fn(sums)
            (loss if self.scaler is None else loss * self.scaler.scale).backward()
        return self._results(sums)

    def evaluate(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Engine`; bypasses DDP, which has nothing to reduce."""
        self._begin_graphs()
        with torch.no_grad():
            return self._results(self.module(batch))

    def leave_graphs(self) -> None:
        """Goes on without CUDA graphs, of which none is left."""
        self.cuda_graphs, self.kept = False, []
        self._keep_gradients()

    def _begin_graphs(self) -> None:
        """Allows graphs to write over the results of the micro-step before."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def _results(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns `sums` detached, and outside the graphs' memory."""
        return {name: value.detach().clone() if self.cuda_graphs else value.detach() for name, value in sums.items()}

    def step(self, learning_rate: float, *, skip_above: float = math.inf) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale(self.trainable)
        norm = self.clip_in_update() if self.clips_in_update else self.clip()
        set_learning_rate(self.optimizer, learning_rate)
        healthy = may_update(norm, skip_above)
        if self.context.device.type == "cpu" or not self.skips_steps:
            if healthy:
                self.optimizer.step()
        else:
            # read on the device, so the host need not wait to skip a step
            self.optimizer.found_inf = (~healthy).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        self.refresh_copies()
        self.clear_gradients()
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def refresh_copies(self) -> None:
        """Makes copies again, where layers read them, after weights were changed."""
        for each in self.copies:
            each.refresh()

    def clear_gradients(self) -> None:
        """Prepares gradients for a step's first micro-step.

        Gradients of micro-steps without a reduction are summed in place: in DDP's buckets if zeroed gradients stay
        there, else in as much memory again. With one micro-step DDP itself moves gradients into its buckets, and
        zeroing them would cost a pass. Those that products or CUDA graphs add to are there before.
        """
        kept = self.trainable if self.uses_ddp and self.micro_steps > 1 else self.kept
        gradients = [each.grad for each in kept]
        self.optimizer.zero_grad()
        found = [each for each in gradients if each is not None]
        if found:
            torch._foreach_zero_(found)
        for parameter, gradient in zip(kept, gradients, strict=True):
            parameter.grad = gradient

    def weight_shards(self) -> list[TensorShard]:
        """See `Engine`. Every process has whole weights, and rank 0 returns them."""
        assert self.full_module, "an engine that divides weights says how"
        trained = ((name, value) for name, value in self.module.named_parameters() if value.requires_grad)
        return [whole_shard(name, value.detach()) for name, value in trained] if self.context.is_main else []

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        """See `Engine`. Every process has whole values, its own or gathered, which are divided among all processes."""
        values = self.model_state() if kind == "model" else self.optimizer_state()
        yield from assign_shards(starmap(whole_shard, values), self.context.rank, self.context.world_size)

    def model_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole fp32 value of each of `saved_values`, one at a time; collective."""
        yield from saved_values(self.module)

    def load_parameters(self, values: Callable[[str], Tensor]) -> None:
        with torch.no_grad():
            for name, value in saved_values(self.module):
                value.copy_(values(name))
        self.refresh_copies()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields each parameter that this process has, with its name in the root module."""
        yield from self.module.named_parameters()

    def optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields `parameter_name/state_name` and its whole value, one at a time; collective."""
        for name, parameter in self.named_parameters():
            for state, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}/{state}", value

    def load_optimizer_state(self, values: Callable[[str], Tensor], names: frozenset[str]) -> None:
        fused = {each for group in self.optimizer.param_groups if group.get("fused") for each in group["params"]}
        for name, parameter in self.named_parameters():
            # sorted: a set's order differs between processes, and all must assign the shards of a checkpoint alike
            states = {key.rpartition("/")[2]: key for key in sorted(names) if key.rpartition("/")[0] == name}
            if not states or not parameter.requires_grad:
                continue
            on_device = parameter in fused or parameter.device.type == "cpu"
            self.optimizer.state[parameter] = {
                state: values(key).to(parameter.device if state != "step" or on_device else "cpu", copy=True)
                for state, key in states.items()
            }

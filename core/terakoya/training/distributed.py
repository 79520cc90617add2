"""Processes, devices and gradients: the only place, with its DeepSpeed sibling, that touches accelerate.

accelerate sets up the processes and wraps the module once; each step then calls torch directly.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from terakoya.errors import UserError
from terakoya.training import cpu_memory
from terakoya.training.engine import Weigh, autocast_forward, saved_values
from terakoya.training.loss_scaling import LossScaler
from terakoya.training.pieces import Kind, Piece, dealt, whole
from terakoya.training.world import Launched, Place, Topology, host_name

BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the second is the first's name before torch 2.13
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""DDP's switch for sending buffers around before each forward: no model here changes its buffers in training."""


@dataclass
class Connection:
    """This process's link to the others. Host-side numbers travel over gloo, so the device never waits for them.

    Attributes:
        control: all processes, over gloo; None where there is one.
        within: the processes of this one's replica, over the device's backend; None where it is the only one.
        across: the processes that have this one's place in their replicas; None where there is one replica.
    """

    rank: int
    world_size: int
    device: torch.device
    topology: Topology
    control: dist.ProcessGroup | None
    accelerator: Any = field(repr=False)
    within: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @property
    def replica(self) -> int:
        """The replica of the model that this process belongs to."""
        return self.topology.replica(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this process is the first of its replica."""
        return self.topology.leads(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """The element-wise sums over ranks of `counts`, each below 2**63."""
        if self.control is None:
            return list(counts)
        summed = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(summed, group=self.control)
        return summed.tolist()

    def sum_on_device(self, values: Tensor) -> Tensor:
        """The element-wise sum over ranks of `values`, a tensor on the device; reduced in place."""
        if self.control is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small `value`, by rank, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's small `value` on every rank."""
        if self.control is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def apart(self, timeout_seconds: float) -> Connection:
        """The same processes over a group of its own, so that another thread can talk to them; collective."""
        if self.control is None:
            return self
        return replace(self, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)))

    def together(self, action: str, error: BaseException | None) -> None:
        """Raises on every rank if any rank brings an `error`, naming rank, host and cause.

        Raises:
            UserError: at least one rank failed at `action`.
        """
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        failed = [
            f"rank {rank} on {self.topology.places[rank].host}: {text}"
            for rank, text in enumerate(texts)
            if text is not None
        ]
        if failed:
            raise UserError(
                f"{action} failed on {len(failed)} of {self.world_size} processes; " + "; ".join(failed)
            ) from error

    def close(self, *, failed: bool) -> None:
        """Leaves the process group; all together, unless this process `failed` and the others may be gone."""
        if dist.is_initialized():
            if not failed:
                self.barrier()
            dist.destroy_process_group()


def connect(
    launched: Launched, *, deepspeed: bool = False, replica_size: int = 1, timeout_seconds: int = 600
) -> Connection:
    """Joins the processes the launcher started and checks that they are the ones it promised.

    Args:
        deepspeed: whether DeepSpeed is to use them.
        replica_size: how many of them work on the same rows.
        timeout_seconds: how long each waits for the others.

    Raises:
        UserError: the world that came up is not the one asked for, or not a multiple of `replica_size`.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    if launched.launcher == "srun":
        if "MASTER_ADDR" not in os.environ:
            raise UserError(
                "srun started several processes, but MASTER_ADDR is not set; before srun: "
                "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
            )
        places = {"RANK": launched.rank, "WORLD_SIZE": launched.world_size, "LOCAL_RANK": launched.local_rank}
        os.environ.update(
            {name: str(value) for name, value in places.items()}, MASTER_PORT=os.environ.get("MASTER_PORT", "29500")
        )
    cuda = torch.cuda.is_available()
    if not cuda:
        cpu_memory.keep()
    handlers = []
    if launched.world_size > 1 or deepspeed:
        backend = "nccl" if cuda else "gloo"
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=timeout_seconds)))
    if deepspeed:
        from terakoya.training.distributed_deepspeed import accelerator as build

        accelerator = build(launched, handlers)
    else:
        accelerator = Accelerator(cpu=not cuda, kwargs_handlers=handlers)
    came_up = dist.get_world_size() if dist.is_initialized() else 1
    if came_up != launched.world_size or accelerator.num_processes != launched.world_size:
        raise UserError(
            f"the launcher asked for {launched.world_size} processes, but {came_up} are connected "
            f"(accelerate sees {accelerator.num_processes}); start with torchrun or with `terakoya train --processes N`"
        )
    me = Place(launched.rank, launched.node_rank, launched.local_rank, host_name())
    if launched.world_size == 1 and not dist.is_initialized():
        return Connection(0, 1, accelerator.device, Topology((me,), replica_size), None, accelerator)
    timeout = timedelta(seconds=timeout_seconds)
    control = dist.group.WORLD if not cuda else dist.new_group(backend="gloo", timeout=timeout)
    reported: list[Any] = [None] * launched.world_size
    dist.all_gather_object(reported, me, group=control)
    topology = Topology(tuple(reported), replica_size)
    rank = dist.get_rank()
    within, across = _groups(topology, rank, timeout)
    return Connection(
        rank, launched.world_size, accelerator.device, topology, control, accelerator, within=within, across=across
    )


def _groups(
    topology: Topology, rank: int, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """`Connection.within` and `across` of `rank`; every rank makes every group, in the same order."""
    size, world = topology.replica_size, len(topology.places)
    if size == 1:
        return None, dist.group.WORLD if world > 1 else None
    within = across = None
    for replica in range(topology.replicas):
        group = dist.new_group(list(topology.members(replica)), timeout=timeout)
        within = group if rank in topology.members(replica) else within
    for place in range(size if topology.replicas > 1 else 0):
        ranks = range(place, world, size)
        group = dist.new_group(list(ranks), timeout=timeout)
        across = group if rank in ranks else across
    return within, across


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

    What replicas of several processes need differs in `reducing` (who adds gradients up) and `clip`.
    """

    full_module = True

    def __init__(
        self,
        connection: Connection,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str,
        max_grad_norm: float,
        scaler: LossScaler | None = None,
    ) -> None:
        self.module = module.to(connection.device)
        self.scaler = scaler
        self.optimizer = optimizer
        self.connection = connection
        self.max_grad_norm = max_grad_norm
        self.dropout_rank = connection.rank
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        autocast_forward(self.module, connection.device, precision)
        self.wrapped: nn.Module = self.module
        group = self.reducing()
        if group is not None:
            buffers_stay: dict[str, Any] = {BUFFERS_OPTION: False}
            self.wrapped = DistributedDataParallel(
                self.module,
                device_ids=[connection.device.index] if connection.device.type == "cuda" else None,
                process_group=group,
                gradient_as_bucket_view=True,
                **buffers_stay,
            )
            self.wrapped.register_comm_hook(None, lambda _, bucket: sum_gradients(group, bucket))
        self.fused = bool(optimizer.defaults.get("fused"))  # all of it; an optimizer made of several may be in part

    def reducing(self) -> dist.ProcessGroup | None:
        """The processes whose gradients are added up; None where this one has nobody to add to."""
        return self.connection.across

    def clip(self) -> Tensor:
        """Scales gradients down to `max_grad_norm`; returns their norm before, a float32 scalar on the device."""
        return nn.utils.clip_grad_norm_(self.trainable, self.max_grad_norm or float("inf"), foreach=True)

    def micro_step(self, batch: Mapping[str, Tensor], weigh: Weigh, *, last: bool) -> Mapping[str, Tensor]:
        """See `Engine`."""
        alone = self.wrapped is self.module
        with contextlib.nullcontext() if last or alone else self.wrapped.no_sync():  # type: ignore[operator]
            sums = self.wrapped(batch)
            loss = weigh(sums)
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
        if self.connection.device.type == "cpu" or not self.fused:
            if torch.isfinite(norm):
                self.optimizer.step()
        else:
            # fused kernels look at `found_inf` on the device, so the host need not wait to skip a step
            self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.wrapped is self.module)
        if self.scaler is not None:
            self.scaler.update(norm)
        return norm

    def owned_pieces(self, kind: Kind) -> Iterator[Piece]:
        """See `Engine`. Every process has whole values, its own or gathered: they are dealt."""
        values = self.parameters() if kind == "model" else self.optimizer_state()
        yield from dealt(starmap(whole, values), self.connection.rank, self.connection.world_size)

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

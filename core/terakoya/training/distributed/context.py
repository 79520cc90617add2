"""How a process communicates with the others: accelerate sets up the process group, engines call torch directly."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terakoya.errors import UserError
from terakoya.training.distributed import cpu_allocator
from terakoya.training.distributed.topology import LaunchInfo, ProcessInfo, Topology, host_name


@dataclass
class DistributedContext:
    """This process among all processes of the run. Numbers on the host go over gloo: the device never waits for them.

    Attributes:
        control: the group of all processes, over gloo; None where this process is the only one.
        replica_group: the processes of this one's replica, over the device's backend; None where it is the only one.
        data_parallel_group: the processes at this one's position in all replicas; None where there is one replica.
    """

    rank: int
    world_size: int
    device: torch.device
    topology: Topology
    control: dist.ProcessGroup | None
    accelerator: Any = field(repr=False)
    replica_group: dist.ProcessGroup | None = None
    data_parallel_group: dist.ProcessGroup | None = None

    @property
    def replica(self) -> int:
        """Index of the replica of the model that this process belongs to."""
        return self.topology.replica_of(self.rank)

    @property
    def is_replica_leader(self) -> bool:
        """Whether this process is the first of its replica."""
        return self.topology.is_replica_leader(self.rank)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Returns the element-wise sums of `counts` over all ranks; each sum must be below 2**63."""
        return self.begin_sum(counts)()

    def begin_sum(self, counts: Sequence[int]) -> Callable[[], list[int]]:
        """Begins `sum_counts` and returns at once; the returned function waits for the sums and returns them."""
        if self.control is None:
            return lambda: list(counts)
        summed = torch.tensor(counts, dtype=torch.int64)
        work = dist.all_reduce(summed, group=self.control, async_op=True)
        assert work is not None

        def wait_for_sums() -> list[int]:
            work.wait()
            return summed.tolist()

        return wait_for_sums

    def sum_on_device(self, values: Tensor) -> Tensor:
        """Returns `values`, a tensor on the device, reduced in place to its element-wise sum over all ranks."""
        if self.control is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Returns the small `value` of every rank, by rank, on every rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's small `value` on every rank."""
        if self.control is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def new_group(self, timeout_seconds: float) -> DistributedContext:
        """Returns the same context over a new gloo group, for communication from another thread; collective."""
        if self.control is None:
            return self
        return replace(self, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)))

    def broadcast_module(self, module: nn.Module) -> None:
        """Copies rank 0's weights and buffers of `module` to every rank, one at a time, by way of the device.

        `module` is on the host. Only rank 0 reads `start_from`.
        """
        for value in [*module.parameters(), *module.buffers()]:
            on_device = value.detach().to(self.device)
            dist.broadcast(on_device, src=0)
            value.detach().copy_(on_device)

    def raise_on_all_ranks(self, action: str, error: BaseException | None) -> None:
        """Raises on every rank if any rank passes an `error`; the message names rank, host and cause. Collective.

        Raises:
            UserError: at least one rank failed at `action`.
        """
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        failed = [
            f"rank {rank} on {self.topology.processes[rank].host}: {text}"
            for rank, text in enumerate(texts)
            if text is not None
        ]
        if failed:
            raise UserError(
                f"{action} failed on {len(failed)} of {self.world_size} processes; " + "; ".join(failed)
            ) from error

    def close(self, *, failed: bool) -> None:
        """Leaves the process group: together with all ranks, unless this process `failed` and others may be gone."""
        if dist.is_initialized():
            if not failed:
                self.barrier()
            dist.destroy_process_group()


def connect(
    launch: LaunchInfo, *, deepspeed: bool = False, replica_size: int = 1, timeout_seconds: int = 600
) -> DistributedContext:
    """Joins the processes that the launcher started and checks that they are the ones it announced.

    Args:
        deepspeed: whether DeepSpeed will use them.
        replica_size: number of processes that work on the same rows.
        timeout_seconds: how long each process waits for the others.

    Raises:
        UserError: other processes came up than the launcher announced, or not a multiple of `replica_size`.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    if launch.launcher == "srun":
        if "MASTER_ADDR" not in os.environ:
            raise UserError(
                "srun started several processes, but MASTER_ADDR is not set; before srun: "
                "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
            )
        ranks = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": launch.local_rank}
        os.environ.update(
            {name: str(value) for name, value in ranks.items()}, MASTER_PORT=os.environ.get("MASTER_PORT", "29500")
        )
    cuda = torch.cuda.is_available()
    if not cuda:
        cpu_allocator.keep_freed_memory()
    handlers = []
    if launch.world_size > 1 or deepspeed:
        backend = "nccl" if cuda else "gloo"
        handlers.append(InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=timeout_seconds)))
    if deepspeed:
        from terakoya.training.distributed.deepspeed_setup import create_accelerator

        accelerator = create_accelerator(launch, handlers)
    else:
        accelerator = Accelerator(cpu=not cuda, kwargs_handlers=handlers)
    connected = dist.get_world_size() if dist.is_initialized() else 1
    if connected != launch.world_size or accelerator.num_processes != launch.world_size:
        raise UserError(
            f"the launcher asked for {launch.world_size} processes, but {connected} are connected "
            f"(accelerate sees {accelerator.num_processes}); start with torchrun or with `terakoya train --processes N`"
        )
    this = ProcessInfo(launch.rank, launch.node_rank, launch.local_rank, host_name())
    if launch.world_size == 1 and not dist.is_initialized():
        return DistributedContext(0, 1, accelerator.device, Topology((this,), replica_size), None, accelerator)
    timeout = timedelta(seconds=timeout_seconds)
    control = dist.group.WORLD if not cuda else dist.new_group(backend="gloo", timeout=timeout)
    reported: list[Any] = [None] * launch.world_size
    dist.all_gather_object(reported, this, group=control)
    topology = Topology(tuple(reported), replica_size)
    rank = dist.get_rank()
    replica_group, data_parallel_group = create_groups(topology, rank, timeout)
    return DistributedContext(
        rank,
        launch.world_size,
        accelerator.device,
        topology,
        control,
        accelerator,
        replica_group=replica_group,
        data_parallel_group=data_parallel_group,
    )


def create_groups(
    topology: Topology, rank: int, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns the `replica_group` and the `data_parallel_group` of `rank`.

    Collective: every rank creates the groups of all ranks, in the same order.
    """
    size, world = topology.replica_size, len(topology.processes)
    if size == 1:
        return None, dist.group.WORLD if world > 1 else None
    replica_group = data_parallel_group = None
    for replica in range(topology.num_replicas):
        ranks = topology.replica_ranks(replica)
        group = dist.new_group(list(ranks), timeout=timeout)
        replica_group = group if rank in ranks else replica_group
    for position in range(size if topology.num_replicas > 1 else 0):
        ranks = range(position, world, size)
        group = dist.new_group(list(ranks), timeout=timeout)
        data_parallel_group = group if rank in ranks else data_parallel_group
    return replica_group, data_parallel_group

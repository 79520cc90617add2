"""How a process communicates with the others: accelerate sets up the process group, engines call torch directly."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from terakoya.distributed import agreement, cpu_allocator, gpu_allocator, nccl_algorithms
from terakoya.distributed.local_rendezvous import local_rendezvous
from terakoya.distributed.rank_watch import RankWatch
from terakoya.distributed.topology import LaunchInfo, ProcessInfo, Topology, host_name
from terakoya.errors import FileError, RankLostError, TemporaryFailure, UserError, describe_error
from terakoya.plugins import registry

T = TypeVar("T")
NCCL_PATIENCE = 30
"""How much later than the heartbeat NCCL's watchdog ends a process that waits in vain. Unit: seconds."""


@dataclass
class DistributedContext:
    """This process among all processes of the run. Numbers on the host go over gloo: the device never waits for them.

    Attributes:
        device: on CUDA with its index.
        control: the group of all processes, over gloo; None where this process is the only one.
        heartbeat: notices ranks that hang or are gone; None where this process is the only one, or no plugin has it.
    """

    rank: int
    world_size: int
    device: torch.device
    topology: Topology
    control: dist.ProcessGroup | None
    heartbeat: RankWatch | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self.device.type != "cuda" or self.device.index is not None, "see with_index"

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
        return _gather(value, self.control)

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

    def raise_on_all_ranks(self, action: str, error: BaseException | None) -> None:
        """Raises on every rank if any rank passes an `error`; the message names rank, host and cause. Collective.

        Raises:
            FileError: at least one rank failed at `action`, and all that did met an OSError.
            UserError: at least one rank failed at `action`.
        """
        found = self.gather(None if error is None else _describe(error))
        _raise_failures(action, found, self.topology.processes, error)

    def run_on_main(self, action: str, work: Callable[[], T]) -> T | None:
        """Runs `work` on rank 0 and returns its result there; collective. Raises UserError on all ranks if `work`
        raised an OSError or UserError."""
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except (OSError, UserError) as raised:
                error = raised
        self.raise_on_all_ranks(action, error)
        return result

    def decide_on_main(self, work: Callable[[], T]) -> T:
        """Returns on every rank what `work` returns on rank 0, where alone it runs; collective. Raises on every rank
        the UserError that `work` raised."""
        result: T | None = None
        refused: UserError | None = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                refused = error
        result, refused = self.broadcast((result, refused))
        if refused is not None:
            raise refused
        return cast(T, result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error=error)

    def close(self, *, waits: bool = False, error: BaseException | None = None) -> None:
        """Leaves the process group; `waits` until all ranks do, as they must have finished with each other before. With
        an `error` on GPUs the process ends at once instead: NCCL waits for what the other ranks may never do."""
        if self.heartbeat is not None:
            self.heartbeat.close()
        if error is not None and self.device.type == "cuda" and self.world_size > 1:
            error.leaves_at_once = True  # type: ignore[attr-defined]
        elif dist.is_initialized():
            if waits:
                self.barrier()
            dist.destroy_process_group()


def _raise_failures(
    action: str,
    found: Sequence[tuple[str, bool, int | None] | None],
    processes: Sequence[ProcessInfo],
    error: BaseException | None,
) -> None:
    """Raises as `raise_on_all_ranks` does, where any rank has `found` an error, as `_describe` returns it."""
    failed = [
        (f"rank {rank} on {processes[rank].host}: {each[0]}", *each[1:])
        for rank, each in enumerate(found)
        if each is not None
    ]
    if failed:
        texts, of_files, numbers = zip(*failed, strict=True)
        text = f"{action} failed on {len(failed)} of {len(processes)} processes; {'; '.join(texts)}"
        raise FileError(text, numbers[0]) if all(of_files) else UserError(text) from error


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the small `value` of every rank of `group`, by rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _describe(error: BaseException) -> tuple[str, bool, int | None]:
    """Returns the text of `error`, whether it is about files, and the system's number for it."""
    return (
        describe_error(error),
        isinstance(error, OSError | FileError | TemporaryFailure),
        errno.EIO if isinstance(error, TemporaryFailure) else getattr(error, "errno", None),
    )


def connect(
    launch: LaunchInfo,
    *,
    replica_size: int = 1,
    timeout_seconds: int = 600,
    given: agreement.Given = MappingProxyType({}),
    error: UserError | None = None,
    deterministic: bool = False,
) -> DistributedContext:
    """Joins the processes that the launcher started and checks that they are the ones it announced, and that all were
    given the same.

    Args:
        replica_size: number of processes that work on the same rows.
        timeout_seconds: how long each process waits for the others.
        given: what this process was given, and the others must have been given, too.
        error: why this process cannot train.
        deterministic: whether GPUs sum in the same order each time.

    Raises:
        RankLostError: not all processes have come in time.
        UserError: on every rank, one of them has an `error`, or two were given different things; other processes came
            up than the launcher announced, or not a multiple of `replica_size`.
    """
    from accelerate import PartialState

    if launch.launcher == "srun":
        if "MASTER_ADDR" not in os.environ:
            raise UserError(
                "srun started several processes, but MASTER_ADDR is not set; before srun: "
                "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
            )
        ranks = {"RANK": launch.rank, "WORLD_SIZE": launch.world_size, "LOCAL_RANK": launch.local_rank}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.setdefault("MASTER_PORT", "29500")
    cuda = torch.cuda.is_available()
    if cuda:
        gpu_allocator.let_segments_grow()
        if deterministic and launch.world_size > 1:
            nccl_algorithms.sum_in_one_order()
    else:
        cpu_allocator.keep_freed_memory()
    group: dict[str, Any] = {}
    if launch.world_size > 1:
        group = {"backend": "nccl" if cuda else "gloo", "timeout": group_timeout(timeout_seconds, on_gpus=cuda)}
    try:
        with local_rendezvous(launch):
            state = PartialState(cpu=not cuda, **group)  # an Accelerator would read its launcher's engine and precision
    except dist.DistStoreError as failed:
        raise RankLostError(
            f"not all {launch.world_size} processes have connected within {timeout_seconds} s: see what those that are "
            "missing have printed"
        ) from failed
    except RuntimeError as failed:
        if "connectFullMesh" not in str(failed):
            raise
        reason = str(failed).splitlines()[0]
        raise RankLostError(
            f"the processes do not reach each other by gloo: {reason}; where a host's own name "
            "means 127.0.0.1, name the network's interface in GLOO_SOCKET_IFNAME"
        ) from failed
    device = with_index(state.device)
    connected = dist.get_world_size() if dist.is_initialized() else 1
    if connected != launch.world_size or state.num_processes != launch.world_size:
        raise UserError(
            f"the launcher asked for {launch.world_size} processes, but {connected} are connected "
            f"(accelerate sees {state.num_processes}); start with torchrun or with `terakoya train --processes N`"
        )
    this = ProcessInfo(launch.rank, launch.node_rank, launch.local_rank, host_name())
    if launch.world_size == 1 and not dist.is_initialized():
        return DistributedContext(0, 1, device, Topology((this,), replica_size), None)
    timeout = timedelta(seconds=timeout_seconds)
    control = dist.group.WORLD if not cuda else dist.new_group(backend="gloo", timeout=timeout)
    described = None if error is None else _describe(error)
    reported = _gather((this, os.urandom(8).hex(), agreement.digest(given), described), control)
    processes, (meeting, *_), digests, errors = zip(*reported, strict=True)
    try:
        if error is not None and len(set(errors)) == 1:
            raise error
        _raise_failures("the start", errors, processes, error)
        if len(set(digests)) > 1:
            different = agreement.describe_differences(_gather(given, control), processes)
            raise UserError(
                f"the processes of the run were given different things:\n{different}\n"
                "Give all of them the same parameters, stores, plugins and versions, and start them again"
            )
    except UserError as refused:
        dist.destroy_process_group()
        refused.leaves_at_once = True
        raise
    topology = Topology(processes, replica_size)
    rank = dist.get_rank()
    watch = registry().watches.get("ranks") if launch.world_size > 1 else None
    heartbeat = None if watch is None else watch[0](topology, rank, timeout_seconds, meeting)
    return DistributedContext(rank, launch.world_size, device, topology, control, heartbeat)


def group_timeout(seconds: float, *, on_gpus: bool) -> timedelta:
    """Returns how long the collectives of a group may take where each process waits `seconds` for the others: over NCCL
    longer, whose watchdog kills the process, before the heartbeat could name a rank."""
    return timedelta(seconds=seconds + (NCCL_PATIENCE if on_gpus else 0))


def with_index(device: torch.device) -> torch.device:
    """Returns `device`, and for "cuda" without an index the GPU that this process uses: each GPU has its generator."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device

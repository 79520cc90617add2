"""The processes of a run as a mesh with five axes, and the process groups along them.

An axis is a way to divide the work: `pp` divides the blocks of a model, `sp` the positions of its rows (`sp_size` or
`cp_size`) and `tp` its matrix products; together these processes are a replica. `dp_replicate` and `dp_shard` divide
rows among replicas; those along `dp_shard` may share weights. Ranks of a replica are consecutive, and `tp`, which
communicates most, is innermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from terakoya.config.parallel import Parallel
from terakoya.distributed.context import DistributedContext, group_timeout

AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
DATA = ("dp_replicate", "dp_shard")
"""The axes along which processes have different rows."""


class ProcessMesh:
    """The processes of a run, seen from one of them. Axes are given in the order of `AXES`.

    Attributes:
        ranks: rank of each process, with one dimension for each of `AXES`.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int, device_type: str, timeout: timedelta) -> None:
        """`sizes` is the number of processes along each axis; their product is the number of all processes."""
        inside = [sizes[axis] for axis in ("pp", "sp", "tp")]
        replicas = [sizes[axis] for axis in DATA]
        self.ranks = torch.arange(dist.get_world_size()).view(*replicas, *inside).permute(2, 0, 1, 3, 4)
        self.rank = rank
        self.device_type = device_type
        self.timeout = timeout
        self.own: dict[tuple[str, ...], list[int]] = {}
        self.groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    @classmethod
    def of(cls, context: DistributedContext, parallel: Parallel) -> Self:
        """Returns the mesh that `parallel` means for the processes of `context`.

        Raises:
            UserError: the replicas cannot be divided into groups of `dp_shard_size`.
        """
        replicas = context.topology.num_replicas
        shard = parallel.shard_size(replicas) if parallel.engine == "fsdp" else 1
        sizes = {
            "pp": parallel.pp_size, "dp_replicate": replicas // shard, "dp_shard": shard,
            "sp": parallel.position_processes, "tp": parallel.tp_size,
        }  # fmt: skip
        timeout = group_timeout(parallel.timeout_seconds, on_gpus=context.device.type == "cuda")
        return cls(sizes, context.rank, context.device.type, timeout)

    def size(self, *axes: str) -> int:
        """Number of processes that differ from this one along `axes` alone, itself included."""
        return len(self.members(*axes))

    def index(self, *axes: str) -> int:
        """This process's number among them."""
        return self.members(*axes).index(self.rank)

    def members(self, *axes: str) -> list[int]:
        """Their ranks, in the order of the mesh."""
        if axes not in self.own:
            self.own[axes] = next(line for line in self._lines(axes).tolist() if self.rank in line)
        return self.own[axes]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Their process group; None where there is only this process. Collective when it is first asked for."""
        axes = tuple(axis for axis in axes if self.size(axis) > 1)
        if axes not in self.groups:
            self.groups[axes] = self.new_group(self._lines(axes)) if axes else None
        return self.groups[axes]

    def ends(self) -> dist.ProcessGroup | None:
        """The group of the first and the last process along `pp`; None on those in between. Collective."""
        return self.new_group(self._lines(("pp",))[:, [0, -1]])

    def new_group(self, lines: Tensor) -> dist.ProcessGroup | None:
        """Creates a group for each row of `lines`, which are ranks; returns this process's. Collective."""
        if lines.shape[1] == dist.get_world_size():
            return dist.group.WORLD
        own: dist.ProcessGroup | None
        own, _ = dist.new_subgroups_by_enumeration(lines.tolist(), timeout=self.timeout)
        return own

    def device_mesh(self, *dimensions: Sequence[str]) -> DeviceMesh:
        """Returns torch's mesh of the processes that differ along `dimensions` alone. Each dimension is one or several
        axes; those of one process are left out. Collective."""
        groups = {tuple(axes): group for axes in dimensions if (group := self.group(*axes)) is not None}
        ranks = torch.tensor(self.members(*(axis for axes in groups for axis in axes)))
        ranks = ranks.view([self.size(*axes) for axes in groups])
        names = tuple("_".join(axes) for axes in groups)
        return DeviceMesh.from_group([*groups.values()], self.device_type, mesh=ranks, mesh_dim_names=names)

    def _lines(self, axes: Sequence[str]) -> Tensor:
        """The ranks of processes that differ along `axes` alone, a row for each choice of the other coordinates."""
        assert list(axes) == sorted(axes, key=AXES.index), "axes in the order of AXES"
        others = [axis for axis in AXES if axis not in axes]
        ranks = self.ranks.permute([AXES.index(axis) for axis in (*others, *axes)])
        return ranks.reshape(-1, math.prod(ranks.shape[len(others) :]))

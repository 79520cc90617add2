"""Which processes take part in a run: what the launcher's variables say, and what came up.

Any launcher works that sets the variables of torchrun, of `accelerate launch` or of srun. The world that came up is
compared with what was asked for before anything else happens: a launcher that silently starts independent processes
is the commonest way to train the wrong thing.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terakoya.components import batch_table
from terakoya.errors import UserError

HOST_VARIABLE = "TERAKOYA_HOST"
"""What a launcher calls this host, where that is not the host's own name."""


@dataclass(frozen=True)
class LaunchInfo:
    """What the environment says of this process, before any context."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    launcher: str | None

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, *, node_rank: int | None = None
    ) -> LaunchInfo:
        """From torchrun's or srun's variables; a process of its own without them.

        The node rank is `node_rank` (`--node-rank`), else GROUP_RANK, else SLURM_NODEID, else 0.

        Raises:
            UserError: a variable is missing beside others or is no number.
        """

        def number(name: str, default: int | None = None) -> int:
            if name not in environment:
                if default is None:
                    raise UserError(
                        f"launcher: {name} is not set although RANK is; start with torchrun, srun or accelerate"
                    )
                return default
            try:
                return int(environment[name])
            except ValueError:
                raise UserError(f'launcher: {name} should be a number, got "{environment[name]}"') from None

        node = node_rank if node_rank is not None else number("GROUP_RANK", number("SLURM_NODEID", 0))
        if "RANK" in environment:
            return cls(number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), node, "torchrun")
        if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
            return cls(number("SLURM_PROCID"), number("SLURM_NTASKS"), number("SLURM_LOCALID"), node, "srun")
        return cls(0, 1, 0, node, None)


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """This host's name as its launcher has it, else its own."""
    return environment.get(HOST_VARIABLE) or environment.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class ProcessInfo:
    """One process as it reported itself after connecting."""

    rank: int
    node_rank: int
    local_rank: int
    host: str


@dataclass(frozen=True)
class Topology:
    """Where each rank runs, how many processes each node has, and how many neighbouring ranks work on the same rows: a
    replica of the model. UserError where the processes are no multiple of it."""

    processes: tuple[ProcessInfo, ...]
    replica_size: int = 1

    def __post_init__(self) -> None:
        if len(self.processes) % self.replica_size:
            raise UserError(
                f"parallel: {self.replica_size} processes work on the same rows, but there are {self.describe()}; "
                f"start a multiple of {self.replica_size}"
            )

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.processes) // self.replica_size

    def replica(self, rank: int) -> int:
        """The replica that `rank` belongs to; its members are neighbouring ranks."""
        return rank // self.replica_size

    def members(self, replica: int) -> range:
        """The ranks of a replica."""
        return range(replica * self.replica_size, (replica + 1) * self.replica_size)

    def is_replica_leader(self, rank: int) -> bool:
        """Whether `rank` is the first of its replica: the one that counts the replica's rows."""
        return rank % self.replica_size == 0

    def processes_per_node(self) -> dict[int, int]:
        """Node rank -> number of processes on it."""
        return dict(sorted(Counter(process.node_rank for process in self.processes).items()))

    def describe(self) -> str:
        """For example `3 processes on 2 nodes (2 on a01, 1 on a02)`."""
        nodes = self.processes_per_node()
        if len(nodes) == 1:
            return f"{len(self.processes)} process{'es' if len(self.processes) > 1 else ''} on {self.processes[0].host}"
        hosts = {process.node_rank: process.host for process in self.processes}
        each = ", ".join(f"{count} on {hosts[node]}" for node, count in nodes.items())
        return f"{len(self.processes)} processes on {len(nodes)} nodes ({each})"


@dataclass(frozen=True)
class RankBatch:
    """The rows of each global batch that one rank takes.

    Attributes:
        start, stop: its rows, counted within the global batch.
        micro_batch_size: rows a micro-step.
        micro_steps: micro-steps of each optimizer step, the same on every rank.
        global_rows: rows of the global batch.
    """

    start: int
    stop: int
    micro_batch_size: int
    micro_steps: int
    global_rows: int

    def micro_batches(self) -> list[tuple[int, int]]:
        """The rows [start, stop) of each micro-batch within the global batch; at most `micro_steps` of them."""
        cuts = range(self.start, self.stop, self.micro_batch_size)
        return [(first, min(first + self.micro_batch_size, self.stop)) for first in cuts]


def node_rows(batch_size: Mapping[str, int], topology: Topology, *, redistribute: bool = False) -> list[int]:
    """Rows of each node, in the order of node ranks, checked against the world that came up.

    Raises:
        UserError: the table does not fit the world; the message holds a table that would.
    """
    hosts = {process.node_rank: process.host for process in topology.processes}
    return list(
        batch_table.rows_of_nodes(batch_size, hosts, there=topology.describe(), redistribute=redistribute).values()
    )


def lost_nodes(batch_size: Mapping[str, int], topology: Topology) -> str | None:
    """What is said of a world with fewer nodes than the table: the table it works by. None where it has them all."""
    rows = node_rows(batch_size, topology, redistribute=True)
    if len(rows) == len(batch_size):
        return None
    hosts = {process.node_rank: process.host for process in topology.processes}
    by_name = batch_table.by_name(batch_size)
    table = {
        host if by_name else str(node): rows for (node, host), rows in zip(sorted(hosts.items()), rows, strict=True)
    }
    return (
        f"{len(rows)} of {len(batch_size)} nodes are there, {topology.describe()}; they share the global batch of "
        f"{sum(rows)}: {json.dumps(table)}"
    )


def split_evenly(rows: int, parts: int, part: int) -> tuple[int, int]:
    """The `part`-th of `parts` nearly equal pieces of `range(rows)`, larger ones first: 100 over 3 -> 34, 33, 33."""
    size, rest = divmod(rows, parts)
    start = part * size + min(part, rest)
    return start, start + size + (part < rest)


def rank_batches(
    batch_size: Mapping[str, int], micro_batch_size: int | None, topology: Topology, *, redistribute: bool = False
) -> Sequence[RankBatch]:
    """Every rank's share of the global batch, by rank: nodes by the table, a node's replicas nearly equally. Ranks of
    one replica have the same rows; one that takes several whole nodes has the rows of all of them. With `redistribute`
    fewer nodes than the table has entries share the same global batch.

    Raises:
        UserError: the table does not fit the world, or replicas do not fit the nodes.
    """
    rows = node_rows(batch_size, topology, redistribute=redistribute)
    nodes = _replica_nodes(topology)
    on: Counter[tuple[int, ...]] = Counter(nodes)
    spans = []
    for replica, mine in enumerate(nodes):
        first, total = sum(rows[: mine[0]]), sum(rows[node] for node in mine)
        start, stop = split_evenly(total, on[mine], nodes[:replica].count(mine))
        spans.append((first + start, first + stop))
    largest = max(stop - start for start, stop in spans)
    micro = min(micro_batch_size or largest, largest)
    steps = -(-largest // micro)
    return [
        RankBatch(*spans[topology.replica(rank)], micro, steps, sum(rows)) for rank in range(len(topology.processes))
    ]


def _replica_nodes(topology: Topology) -> list[tuple[int, ...]]:
    """The nodes of each replica, by their places in the order of node ranks: one that holds whole replicas, or several
    that hold one whole replica.

    Raises:
        UserError: a replica would share a node with a part of another.
    """
    size, processes = topology.replica_size, topology.processes_per_node()
    order = {node: index for index, node in enumerate(processes)}
    found = []
    for replica in range(topology.replicas):
        nodes = tuple(sorted({topology.processes[rank].node_rank for rank in topology.members(replica)}))
        there = sum(processes[node] for node in nodes)
        if there % size or (len(nodes) > 1 and there != size):
            raise UserError(
                f"parallel: replicas of {size} processes do not fit {topology.describe()}: start a multiple of {size} "
                "on each node, or make a replica of several whole nodes"
            )
        found.append(tuple(order[node] for node in nodes))
    return found

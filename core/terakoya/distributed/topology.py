"""Which processes take part in a run: what the launcher announced, what came up, and which rows each process takes.

Any launcher works that sets the variables of torchrun, of `accelerate launch` or of srun. The processes that came up
are compared with those that the launcher announced before anything else happens: a launcher that silently starts
independent processes is the most common way to train the wrong thing.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terakoya.config import batch_table
from terakoya.errors import UserError

HOST_VARIABLE = "TERAKOYA_HOST"
"""The variable in which a launcher gives this host's name, where it differs from the host's own."""
NODE_RANKS = ("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID")
"""The variables in which launchers give the node's rank; docs/how-to/processes-and-nodes.md says which sets which."""


@dataclass(frozen=True)
class LaunchInfo:
    """What the environment says about this process before it connects to any other. `launcher` is "torchrun" or "srun";
    None for a single process without a launcher."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    launcher: str | None

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, *, node_rank: int | None = None
    ) -> LaunchInfo:
        """Reads the variables of torchrun or srun; without them this is a single process. Raises UserError if a
        variable is missing although RANK is set, or is not a number.

        The node rank is `node_rank` (`--node-rank`), else the first of `NODE_RANKS` that is set, else 0.
        """

        def read_number(name: str) -> int:
            if name not in environment:
                raise UserError(
                    f"launcher: {name} is not set although RANK is; start with torchrun, srun or accelerate"
                )
            try:
                return int(environment[name])
            except ValueError:
                raise UserError(f'launcher: {name} should be a number, got "{environment[name]}"') from None

        ranks = (read_number(name) for name in NODE_RANKS if name in environment)
        node = node_rank if node_rank is not None else next(ranks, 0)
        if "RANK" in environment:
            return cls(read_number("RANK"), read_number("WORLD_SIZE"), read_number("LOCAL_RANK"), node, "torchrun")
        if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
            rank, world_size, local_rank = map(read_number, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
            return cls(rank, world_size, local_rank, node, "srun")
        return cls(0, 1, 0, node, None)


def host_name() -> str:
    """Returns this host's name as its launcher gives it, else the host's own."""
    return os.environ.get(HOST_VARIABLE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class ProcessInfo:
    """One process as it reported itself after connecting."""

    rank: int
    node_rank: int
    local_rank: int
    host: str


@dataclass(frozen=True)
class Topology:
    """The processes of a run by rank, and how they form replicas of the model.

    A replica is `replica_size` consecutive ranks that work on the same rows. Raises UserError where the number of
    processes is not a multiple of it.
    """

    processes: tuple[ProcessInfo, ...]
    replica_size: int = 1

    def __post_init__(self) -> None:
        if len(self.processes) % self.replica_size:
            raise UserError(
                f"parallel: {self.replica_size} processes work on the same rows, but the run has {self.describe()}; "
                f"start a multiple of {self.replica_size}"
            )

    @property
    def num_replicas(self) -> int:
        return len(self.processes) // self.replica_size

    def replica_of(self, rank: int) -> int:
        """Returns the index of the replica that `rank` belongs to."""
        return rank // self.replica_size

    def is_replica_leader(self, rank: int) -> bool:
        """Whether `rank` is the first of its replica: the one that counts the replica's rows."""
        return rank % self.replica_size == 0

    def processes_per_node(self) -> dict[int, int]:
        """Returns node rank -> number of processes on that node, in the order of node ranks."""
        return dict(sorted(Counter(process.node_rank for process in self.processes).items()))

    def hosts(self) -> dict[int, str]:
        """Returns node rank -> name of its host."""
        return {process.node_rank: process.host for process in self.processes}

    def describe(self) -> str:
        """For example `3 processes on 2 nodes (2 on a01, 1 on a02)`."""
        counts, hosts, total = self.processes_per_node(), self.hosts(), len(self.processes)
        if len(counts) == 1:
            return f"{total} process{'es' if total > 1 else ''} on {self.processes[0].host}"
        per_host = ", ".join(f"{count} on {hosts[node]}" for node, count in counts.items())
        return f"{total} processes on {len(counts)} nodes ({per_host})"


@dataclass(frozen=True)
class RankBatch:
    """The rows of each global batch that one rank takes.

    Attributes:
        start, stop: the rank's rows, as positions within the global batch.
        micro_batch_size: rows per micro-step.
        micro_steps: micro-steps per optimizer step, the same on every rank.
        global_rows: rows of the global batch.
    """

    start: int
    stop: int
    micro_batch_size: int
    micro_steps: int
    global_rows: int

    def micro_batches(self) -> list[tuple[int, int]]:
        """Returns the rows [start, stop) of each micro-batch within the global batch; at most `micro_steps` of them."""
        starts = range(self.start, self.stop, self.micro_batch_size)
        return [(first, min(first + self.micro_batch_size, self.stop)) for first in starts]


def node_rows(batch_size: Mapping[str, int], topology: Topology, *, redistribute: bool = False) -> list[int]:
    """Returns the rows of each node, in the order of node ranks. Raises UserError if the table does not fit the
    processes that came up; the message gives a table that would."""
    rows = batch_table.assign_rows(batch_size, topology.hosts(), there=topology.describe(), redistribute=redistribute)
    return list(rows.values())


def describe_lost_nodes(batch_size: Mapping[str, int], topology: Topology) -> str | None:
    """Returns a message with the table that is in effect, where there are fewer nodes than the table has; else None."""
    rows = node_rows(batch_size, topology, redistribute=True)
    if len(rows) == len(batch_size):
        return None
    by_name = batch_table.has_host_names(batch_size)
    nodes = zip(sorted(topology.hosts().items()), rows, strict=True)
    table = {host if by_name else str(node): rows for (node, host), rows in nodes}
    return (
        f"{len(rows)} of {len(batch_size)} nodes came up, {topology.describe()}; they share the global batch of "
        f"{sum(rows)}: {json.dumps(table)}"
    )


def split_evenly(count: int, parts: int, part: int) -> tuple[int, int]:
    """Returns [start, stop) of the `part`-th of `parts` nearly equal parts of `range(count)`.

    The larger parts come first: 100 over 3 is 34, 33, 33.
    """
    size, rest = divmod(count, parts)
    start = part * size + min(part, rest)
    return start, start + size + (part < rest)


def rank_batches(
    batch_size: Mapping[str, int], micro_batch_size: int | None, topology: Topology, *, redistribute: bool = False
) -> Sequence[RankBatch]:
    """Returns the part of the global batch that each rank takes, by rank. Raises UserError if the table does not fit
    the processes, or replicas do not fit the nodes.

    A node takes its entry of the table; the replicas on it share that nearly equally. Ranks of one replica take the
    same rows. A replica that spans several whole nodes takes the rows of all of them. With `redistribute`, fewer nodes
    than the table has entries share the same global batch.
    """
    rows = node_rows(batch_size, topology, redistribute=redistribute)
    replica_nodes = _replica_nodes(topology)
    replicas_on: Counter[tuple[int, ...]] = Counter(replica_nodes)
    spans = []
    for replica, nodes in enumerate(replica_nodes):
        first, total = sum(rows[: nodes[0]]), sum(rows[node] for node in nodes)
        start, stop = split_evenly(total, replicas_on[nodes], replica_nodes[:replica].count(nodes))
        spans.append((first + start, first + stop))
    largest = max(stop - start for start, stop in spans)
    micro = min(micro_batch_size or largest, largest)
    micro_steps = -(-largest // micro)
    ranks = range(len(topology.processes))
    return [RankBatch(*spans[topology.replica_of(rank)], micro, micro_steps, sum(rows)) for rank in ranks]


def _replica_nodes(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the nodes of each replica, as indices in the order of node ranks. A replica either shares one node with
    other whole replicas, or fills several whole nodes. Raises UserError if one would share a node with a part of
    another."""
    size, counts = topology.replica_size, topology.processes_per_node()
    index = {node: position for position, node in enumerate(counts)}
    replica_nodes = []
    for replica in range(topology.num_replicas):
        members = topology.processes[replica * size : (replica + 1) * size]
        nodes = tuple(sorted({process.node_rank for process in members}))
        processes = sum(counts[node] for node in nodes)
        if processes % size or (len(nodes) > 1 and processes != size):
            raise UserError(
                f"parallel: replicas of {size} processes do not fit {topology.describe()}: start a multiple of {size} "
                "on each node, or make a replica of several whole nodes"
            )
        replica_nodes.append(tuple(index[node] for node in nodes))
    return replica_nodes

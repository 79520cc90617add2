"""Which rows each rank takes, for any table and any number of processes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terakoya.distributed.topology import LaunchInfo, ProcessInfo, Topology, rank_batches, split_evenly
from terakoya.errors import UserError


def topology(*processes: int) -> Topology:
    """Node i with `processes[i]` processes, ranks in node order."""
    node_and_local_ranks = [(node, local) for node, count in enumerate(processes) for local in range(count)]
    return Topology(
        tuple(ProcessInfo(rank, node, local, f"h{node}") for rank, (node, local) in enumerate(node_and_local_ranks))
    )


def spans(table: dict[str, int], *processes: int, micro: int | None = None) -> list[tuple[int, int]]:
    return [(batch.start, batch.stop) for batch in rank_batches(table, micro, topology(*processes))]


def test_tables_of_language_pretraining() -> None:
    assert spans({"0": 100, "1": 100, "2": 56}, 1, 1, 1) == [(0, 100), (100, 200), (200, 256)]
    assert spans({"0": 80, "1": 80, "2": 48, "3": 48}, 1, 1, 1, 1) == [(0, 80), (80, 160), (160, 208), (208, 256)]
    assert spans({"-1": 256}, 1) == [(0, 256)]


def test_processes_of_a_node_share_nearly_equally() -> None:
    assert spans({"-1": 100}, 3) == [(0, 34), (34, 67), (67, 100)]
    assert spans({"0": 5, "1": 3}, 2, 1) == [(0, 3), (3, 5), (5, 8)]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=5), st.integers(1, 50))
def test_every_row_is_taken_once_in_equally_many_micro_steps(nodes: list[tuple[int, int]], micro: int) -> None:
    table = {str(node): rows for node, (rows, _) in enumerate(nodes)} if len(nodes) > 1 else {"-1": nodes[0][0]}
    batches = rank_batches(table, micro, topology(*(count for _, count in nodes)))
    rows = [row for batch in batches for row in range(batch.start, batch.stop)]
    assert rows == list(range(sum(table.values())))
    assert len({batch.micro_steps for batch in batches}) == 1
    assert all(batch.stop - batch.start <= batch.micro_steps * batch.micro_batch_size for batch in batches)
    assert (
        max(batch.stop - batch.start for batch in batches) > (batches[0].micro_steps - 1) * batches[0].micro_batch_size
    )


def test_a_table_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(UserError, match=r'for 1 node, .*2 nodes.*\{"0": 128, "1": 128\}'):
        spans({"-1": 256}, 1, 1)
    with pytest.raises(UserError, match=r'for 3 nodes, .*1 process on h0.*\{"-1": 256\}'):
        spans({"0": 100, "1": 100, "2": 56}, 1)
    twice = Topology((ProcessInfo(0, 0, 0, "a"), ProcessInfo(1, 5, 0, "b")))
    with pytest.raises(UserError, match="--node-rank"):
        rank_batches({"0": 1, "1": 1}, None, twice)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_split_evenly_covers_everything_larger_parts_first(rows: int, parts: int) -> None:
    bounds = [split_evenly(rows, parts, part) for part in range(parts)]
    sizes = [stop - start for start, stop in bounds]
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_the_variables_of_every_launcher_are_read() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert LaunchInfo.from_environment(torchrun) == LaunchInfo(3, 4, 1, 1, "torchrun")
    srun = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    assert LaunchInfo.from_environment(srun) == LaunchInfo(2, 3, 0, 2, "srun")
    assert LaunchInfo.from_environment({}) == LaunchInfo(0, 1, 0, 0, None)
    assert LaunchInfo.from_environment(torchrun, node_rank=7).node_rank == 7
    assert LaunchInfo.from_environment({**torchrun, "SLURM_NODEID": "5"}).node_rank == 1
    with pytest.raises(UserError, match="WORLD_SIZE is not set"):
        LaunchInfo.from_environment({"RANK": "0"})
    with pytest.raises(UserError, match='got "two"'):
        LaunchInfo.from_environment({**torchrun, "RANK": "two"})


def replicas(size: int, *processes: int) -> Topology:
    return Topology(topology(*processes).processes, size)


def test_ranks_of_a_replica_take_the_same_rows() -> None:
    batches = rank_batches({"0": 7, "1": 5}, 2, replicas(2, 4, 2))
    assert [(batch.start, batch.stop) for batch in batches] == [(0, 4), (0, 4), (4, 7), (4, 7), (7, 12), (7, 12)]
    assert {(batch.micro_batch_size, batch.micro_steps, batch.global_rows) for batch in batches} == {(2, 3, 12)}
    assert [replicas(2, 4, 2).is_replica_leader(rank) for rank in range(6)] == [True, False] * 3


def test_a_replica_of_several_nodes_takes_the_rows_of_all() -> None:
    batches = rank_batches({"0": 3, "1": 4, "2": 5, "3": 1}, None, replicas(2, 1, 1, 1, 1))
    assert [(batch.start, batch.stop) for batch in batches] == [(0, 7), (0, 7), (7, 13), (7, 13)]


@pytest.mark.parametrize(
    ("size", "processes", "message"),
    [
        (2, (3,), "2 processes work on the same rows, but the run has 3 processes on h0; start a multiple of 2"),
        (2, (3, 1), "replicas of 2 processes do not fit 4 processes on 2 nodes"),
        (3, (4, 2), "start a multiple of 3 on each node"),
    ],
)
def test_replicas_that_do_not_fit_the_nodes_are_refused(size: int, processes: tuple[int, ...], message: str) -> None:
    table = {str(node): 8 for node in range(len(processes))} if len(processes) > 1 else {"-1": 8}
    with pytest.raises(UserError, match=message):
        rank_batches(table, None, replicas(size, *processes))

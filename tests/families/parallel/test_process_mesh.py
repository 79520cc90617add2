"""Which processes are along which axis, and which values of a tensor each of them holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from terakoya_parallel.mesh import AXES, ProcessMesh
from terakoya_parallel.tensor_part import TensorPart

SIZES = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "sp": 1, "tp": 2}


@contextmanager
def mesh_of(rank: int, sizes: Mapping[str, int] = SIZES) -> Iterator[ProcessMesh]:
    """The mesh in a world that exchanges nothing."""
    world = torch.tensor(list(sizes.values())).prod().item()
    dist.init_process_group("fake", rank=rank, world_size=int(world), store=FakeStore())
    try:
        yield ProcessMesh(sizes, rank, "cpu", timedelta(seconds=60))
    finally:
        dist.destroy_process_group()


def test_a_replica_is_neighbouring_ranks_and_products_are_shared_by_the_nearest() -> None:
    with mesh_of(6) as mesh:
        assert mesh.members("pp", "sp", "tp") == [4, 5, 6, 7]
        assert mesh.members("tp") == [6, 7] and mesh.members("pp") == [4, 6]
        assert mesh.members("dp_replicate", "dp_shard") == [2, 6]
        assert [mesh.index(axis) for axis in AXES] == [1, 0, 1, 0, 0]
        assert mesh.size("pp", "tp") == 4 and mesh.size("sp") == 1


def test_groups_are_those_of_the_members() -> None:
    with mesh_of(6) as mesh:
        for axes in (("tp",), ("pp",), ("dp_replicate", "dp_shard"), ("pp", "tp")):
            group = mesh.group(*axes)
            assert group is not None and dist.get_process_group_ranks(group) == mesh.members(*axes)
        assert mesh.group("sp") is None and mesh.group("dp_replicate") is None
        assert mesh.group("dp_replicate", "dp_shard") is mesh.group("dp_shard")


@pytest.mark.parametrize(("rank", "ends"), [(0, [0, 4]), (2, None), (5, [1, 5])])
def test_the_ends_of_a_pipeline_are_a_group_of_their_own(rank: int, ends: list[int] | None) -> None:
    with mesh_of(rank, {**SIZES, "pp": 3, "dp_shard": 1}) as mesh:
        group = mesh.ends()
        assert (None if group is None else dist.get_process_group_ranks(group)) == ends


def test_torchs_mesh_leaves_out_axes_of_one_process() -> None:
    with mesh_of(6) as mesh:
        assert mesh.device_mesh(("dp_replicate",), ("dp_shard", "sp")).mesh.tolist() == [2, 6]
    with mesh_of(6, {**SIZES, "pp": 1, "dp_replicate": 2}) as mesh:
        found = mesh.device_mesh(("dp_replicate",), ("dp_shard", "sp"))
        assert found.mesh.tolist() == [[0, 2], [4, 6]] and found.get_coordinate() == (1, 1)


@pytest.mark.parametrize(("axis", "matrices"), [(0, 1), (0, 3), (1, 1), (1, 3)])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_rows_of_divided_matrices_hold_each_element_once(axis: int, matrices: int, shards: int) -> None:
    """`tp` divides, then `fully_shard` takes rows of what is left: also where these belong to several matrices."""
    whole = torch.arange(12.0 * 18).view(12, 18)
    found = torch.full_like(whole, torch.nan)
    for index, shard in product(range(2), range(shards)):
        divided = TensorPart.whole(whole.shape).divide(axis, index, 2, matrices=matrices)
        part = divided.rows(shard, shards)
        rows = torch.chunk(divided.cut(whole), shards)  # as torch's `fully_shard` divides them
        own = rows[shard] if shard < len(rows) else rows[0][:0]
        assert torch.equal(part.cut(whole), own) and part.local_shape == own.shape
        for each in part.shards("w", own):
            assert isinstance(each.start, tuple) and each.shape == whole.shape
            place = tuple(slice(at, at + size) for at, size in zip(each.start, each.value.shape, strict=True))
            assert found[place].isnan().all()
            found[place] = each.value
    assert torch.equal(found, whole)

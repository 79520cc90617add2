"""The state that many processes write is what one reads: shards of any form, assigned, read whole or in ranges."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terakoya.errors import UserError
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.checkpoint.state import SavedState
from terakoya.training.engines import tensor_shards
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard


class Source:
    """Yields the same shards of the model each time, and none of the optimizer; counts them."""

    def __init__(self, *shards: TensorShard) -> None:
        self.shards = shards
        self.yielded = 0

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        for shard in self.shards if kind == "model" else ():
            self.yielded += 1
            yield shard


def write(folder: Path, *sources: Source) -> SavedState:
    """Returns the state that one rank per source writes."""
    (folder / "state").mkdir(parents=True, exist_ok=True)
    for rank, source in enumerate(sources):
        checkpoint_state.write(folder / "state", rank, source)
    return SavedState(folder, "model")


def flat(name: str, value: Tensor, start: int, stop: int) -> TensorShard:
    return TensorShard(name, value.flatten()[start:stop], tuple(value.shape), start)


def box(name: str, value: Tensor, *slices: slice) -> TensorShard:
    return TensorShard(name, value[slices], tuple(value.shape), tuple(each.start or 0 for each in slices))


VALUE = torch.arange(60.0).reshape(6, 10)


@pytest.mark.parametrize("ranges", [(0, 60), (0, 7, 60), (0, 20, 40, 60), (0, 1, 2, 59, 60)])
def test_ranges_of_the_flattened_tensor_are_joined(ranges: tuple[int, ...], tmp_path: Path) -> None:
    sources = [Source(flat("w", VALUE, *each)) for each in pairwise(ranges)]
    state = write(tmp_path, *reversed(sources))  # the order of ranks does not matter
    assert state.names() == {"w"} and state.shape("w") == (6, 10)
    assert torch.equal(state("w"), VALUE)
    for start, size in ((0, 60), (0, 1), (6, 2), (19, 22), (59, 1), (30, 0)):
        assert torch.equal(state.part("w", start, size), VALUE.flatten()[start : start + size]), (start, size)


def test_rows_and_columns_are_joined(tmp_path: Path) -> None:
    top, rest = VALUE[:2], VALUE[2:]
    rows = [Source(box("w", VALUE, slice(0, 2), slice(0, 10))), Source(box("w", VALUE, slice(2, 6), slice(0, 10)))]
    state = write(tmp_path / "rows", *rows)
    assert torch.equal(state("w"), VALUE) and torch.equal(state.part("w", 15, 10), VALUE.flatten()[15:25])
    columns = [
        Source(box("w", VALUE, slice(0, 6), slice(0, 3))),
        Source(
            TensorShard("w", top[:, 3:].clone(), (6, 10), (0, 3)),
            TensorShard("w", rest[:, 3:].T.contiguous().T, (6, 10), (2, 3)),
        ),
    ]
    state = write(tmp_path / "columns", *columns)
    assert torch.equal(state("w"), VALUE) and torch.equal(state.part("w", 15, 10), VALUE.flatten()[15:25])


BOXES = (((0, 0), (6, 10)), ((2, 0), (3, 10)), ((1, 2), (3, 5)), ((0, 9), (6, 1)), ((6, 0), (0, 10)), ((0, 3), (6, 0)))


@pytest.mark.parametrize("form", ["whole", "rows", "columns", "quarters", "ranges"])
def test_boxes_are_read_whatever_the_shards_are(form: str, tmp_path: Path) -> None:
    value = VALUE.bfloat16()  # the type is kept, also of boxes without elements
    halves, sides = (slice(0, 2), slice(2, 6)), (slice(0, 3), slice(3, 10))
    shards = {
        "whole": [whole_shard("w", value)],
        "rows": [box("w", value, rows, slice(0, 10)) for rows in halves],
        "columns": [box("w", value, slice(0, 6), columns) for columns in sides],
        "quarters": [box("w", value, rows, columns) for rows in halves for columns in sides],
        "ranges": [flat("w", value, 0, 17), flat("w", value, 17, 60)],
    }
    state = write(
        tmp_path, *(Source(shard, whole_shard(f"{n}", value[0, 0].clone())) for n, shard in enumerate(shards[form]))
    )
    for start, size in BOXES:
        found = value[tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]
        read = state.box("w", start, size)
        assert torch.equal(read, found) and read.dtype == found.dtype, (start, size)
    assert state.box("0", (), ()) == value[0, 0]


def test_scalars_and_other_types_are_kept(tmp_path: Path) -> None:
    values = {"step": torch.tensor(7.0), "half": torch.ones(3, dtype=torch.bfloat16), "count": torch.tensor([2**40])}
    state = write(tmp_path, *(Source(whole_shard(name, value)) for name, value in values.items()))
    for name, value in values.items():
        read = state(name)
        assert read.dtype == value.dtype and read.shape == value.shape and torch.equal(read, value)


def test_a_shard_of_a_whole_tensor_is_an_ordinary_tensor_in_an_ordinary_file(tmp_path: Path) -> None:
    write(tmp_path, Source(flat("w", VALUE, 0, 60)))
    content = (tmp_path / "state/model-00000.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"} and header["w"]["shape"] == [6, 10]


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, Source(flat("w", VALUE, 0, 40)), Source(flat("w", VALUE, 40, 60)))
    (tmp_path / "state/model-00001.safetensors").unlink()
    state = SavedState(tmp_path, "model")
    for read in (lambda: state("w"), lambda: state.part("w", 0, 10), lambda: state.shape("w")):
        with pytest.raises(UserError, match="a part of w is missing, with its files"):
            read()
    with pytest.raises(UserError, match="has no tensor v; it was saved from another architecture"):
        state("v")


@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=8),
    holders=st.integers(1, 5),
    block=st.integers(4, 200),
)
def test_replicated_tensors_are_assigned_once_and_evenly(shapes: list[list[int]], holders: int, block: int) -> None:
    values = {f"w{number}": torch.rand(shape) for number, shape in enumerate(shapes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_shards, "BLOCK_BYTES", block)
        assigned = [
            list(assign_shards((whole_shard(name, value) for name, value in values.items()), holder, holders))
            for holder in range(holders)
        ]
    times = {name: torch.zeros(value.shape) for name, value in values.items()}
    for shard in (shard for shards in assigned for shard in shards):
        assert isinstance(shard.start, tuple) and shard.shape == tuple(values[shard.name].shape)
        where = tuple(slice(at, at + size) for at, size in zip(shard.start, shard.value.shape, strict=True))
        assert torch.equal(values[shard.name][where], shard.value)
        times[shard.name][where] += 1
    assert all(bool((each == 1).all()) for each in times.values())
    row = max(value[:1].nbytes if value.ndim else value.nbytes for value in values.values())
    sizes = [sum(shard.nbytes for shard in shards) for shards in assigned]
    assert max(sizes) - min(sizes) <= max(block, row)


def test_blocks_have_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a whole tensor, which may have been gathered for a moment, would stay in memory as long as a block."""
    monkeypatch.setattr(tensor_shards, "BLOCK_BYTES", 80)
    for shard in assign_shards([whole_shard("w", VALUE)], 1, 2):
        assert shard.value.untyped_storage().nbytes() == shard.nbytes


def test_after_a_failure_the_iteration_over_shards_continues_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard may be a collective gather, in which the other ranks wait."""
    written: list[Path] = []

    def full(tensors: object, path: Path, metadata: object) -> None:
        written.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_state, "save_file", full)
    monkeypatch.setattr(checkpoint_state, "FILE_BYTES", 1)
    source = Source(*(whole_shard(f"w{number}", VALUE) for number in range(5)))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, source)
    assert source.yielded == 5 and len(written) == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_tensor_that_is_not_finite_is_named_and_nothing_more_is_written(bad: float, tmp_path: Path) -> None:
    broken = VALUE.clone()
    broken[1, 2] = bad
    large = torch.full((4,), torch.finfo(torch.float32).max)  # finite, though the sum of its elements is not
    (tmp_path / "state").mkdir()
    for values, not_finite, files in (
        ({"large": large, "count": torch.tensor(3)}, [], 2),
        ({"a": broken, "b": VALUE, "c": broken}, ["a", "c"], 0),
    ):
        source = Source(*(whole_shard(name, value) for name, value in values.items()))
        written = checkpoint_state.write(tmp_path / "state", 0, source)
        assert (written.not_finite, len(written.files), source.yielded) == (not_finite, files, len(values))


def test_files_are_as_large_as_their_shards(tmp_path: Path) -> None:
    """A file holds only its shards, 4 bytes per element, and a header."""
    write(tmp_path, Source(flat("w", VALUE, 0, 45)), Source(flat("w", VALUE, 45, 60)))
    for rank, elements in ((0, 45), (1, 15)):
        content = (tmp_path / f"state/model-{rank:05d}.safetensors").read_bytes()
        assert len(content) - 8 - int.from_bytes(content[:8], "little") == 4 * elements
    assert math.prod(SavedState(tmp_path, "model").shape("w")) == 60

"""One checkpoint that several ranks write, ranks being threads here: shares, order, and one that fails."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from terakoya.errors import UserError
from terakoya.training.checkpoint import checkpoint
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.distributed import all_ranks
from terakoya.training.distributed.all_ranks import Shutdown, run_on_all_ranks
from terakoya.training.distributed.context import DistributedContext
from terakoya.training.distributed.topology import ProcessInfo, Topology
from terakoya.training.engines import tensor_shards as pieces
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard

RANKS = 3


class Exchange:
    """Where threads hand each other a value each."""

    def __init__(self) -> None:
        self.values: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=20)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        everybody = list(self.values)
        self.barrier.wait()
        return everybody


@dataclass
class Threads(DistributedContext):
    """A link between threads."""

    exchange: Exchange = field(default_factory=Exchange)

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        return [sum(each) for each in zip(*self.exchange.swap(self.rank, counts), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        return self.exchange.swap(self.rank, value)


class Source:
    """A rank of a module that all have alike."""

    def __init__(self, rank: int, module: nn.Module) -> None:
        self.rank = rank
        self.module = module

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        values = list(self.module.state_dict().items()) if kind == "model" else []
        values = values[self.rank :] + values[: self.rank]  # in an order of its own
        yield from assign_shards((whole_shard(name, value) for name, value in values), self.rank, RANKS)


def on_every_rank(work: Callable[[DistributedContext], Any]) -> list[Any]:
    """What each rank's `work` returned, or raised."""
    places = Topology(tuple(ProcessInfo(rank, 0, rank, f"host{rank}") for rank in range(RANKS)))
    exchange = Exchange()
    links = [Threads(rank, RANKS, torch.device("cpu"), places, None, None, exchange=exchange) for rank in range(RANKS)]

    def tried(link: DistributedContext) -> Any:
        try:
            return work(link)
        except (UserError, Shutdown) as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(tried, links))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(pieces, "BLOCK_BYTES", 64)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))


def save(tmp_path: Path, module: nn.Module, step: int) -> list[Any]:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "vocab.txt").write_text("[PAD]\n")
    return on_every_rank(
        lambda link: checkpoint.save(
            tmp_path / "checkpoints", step, link, Source(link.rank, module), facts={"world": RANKS},
            write_models=lambda folder: (folder / "model.json").write_text("{}") and None,
            tokenizer_folder=tokenizer, keep=2,
        )
    )  # fmt: skip


def test_every_rank_writes_its_share_and_the_manifest_has_all(tmp_path: Path, module: nn.Module) -> None:
    folder = tmp_path / "checkpoints/step-00000001"
    assert save(tmp_path, module, 1) == [folder] * RANKS
    assert checkpoint.find_problems(folder) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 2 and manifest["world"] == RANKS
    assert sorted(manifest["files"]) == [
        "model.json", *(f"state/model-0000{rank}.safetensors" for rank in range(RANKS)),
        "state/optimizer-00000.safetensors", "tokenizer/vocab.txt",
    ]  # fmt: skip
    twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    checkpoint_state.load_module(folder, twin)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_shard_sends_the_checkpoint_to_quarantine(damage: str, tmp_path: Path, module: nn.Module) -> None:
    save(tmp_path, module, 1)
    save(tmp_path, module, 2)
    shard = tmp_path / "checkpoints/step-00000002/state/model-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(content)
    found, said = checkpoint.recover_newest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-00000001"
    assert len(said) == 1 and "state/model-00002.safetensors" in said[0] and "quarantine" in said[0]
    assert (tmp_path / "checkpoints/quarantine/step-00000002").is_dir()


@pytest.mark.parametrize(
    "failure",
    [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), SafetensorError("disk full")],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_where_one_rank_cannot_write_all_hear_of_it_and_nothing_is_touched(
    rank: int, failure: Exception, tmp_path: Path, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, module, 1)
    real = checkpoint_state.save_file

    def failing(tensors: Any, path: Path, metadata: Any) -> None:
        if path.name == f"model-0000{rank}.safetensors":
            raise failure
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint_state, "save_file", failing)
    raised = save(tmp_path, module, 2)
    for error in raised:
        assert isinstance(error, UserError)
        assert f"failed on 1 of 3 processes; rank {rank} on host{rank}: " in str(error), error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert checkpoint.find_problems(tmp_path / "checkpoints/step-00000001") == []


def test_the_manifest_waits_for_the_slowest_rank(
    tmp_path: Path, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it lists is on the disk before it is written, whoever wrote it."""
    events: list[str] = []
    real_save, real_fsync, real_rename = checkpoint_state.save_file, os.fsync, Path.rename
    slow = threading.Event()

    def written(tensors: Any, path: Path, metadata: Any) -> None:
        if path.name == "model-00001.safetensors":
            slow.wait(0.5)
        real_save(tensors, path, metadata)

    def fsync(handle: int) -> None:
        events.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(all_ranks, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(checkpoint_state, "save_file", written)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, module, 1)
    manifest = events.index("manifest.json")
    assert {f"model-0000{rank}.safetensors" for rank in range(RANKS)} <= set(events[:manifest])
    assert events[-2:] == ["rename step-00000001", "checkpoints"] and manifest < len(events) - 2


def test_what_is_not_written_once_is_never_committed(tmp_path: Path, module: nn.Module) -> None:
    """A process that leaves to others what nobody writes would find out when it resumes."""
    (tmp_path / "tokenizer").mkdir()
    alone = DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, "here"),)), None, None)
    with pytest.raises(AssertionError, match=r"weight'\] were not written once"):
        checkpoint.save(
            tmp_path / "checkpoints", 1, alone, Source(0, module), facts={}, write_models=lambda folder: None,
            tokenizer_folder=tmp_path / "tokenizer", keep=2,
        )  # fmt: skip
    assert checkpoint.list_checkpoints(tmp_path / "checkpoints") == []


def test_everyone_returns_when_the_last_is_through_with_what_each_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_ranks, "HEARTBEAT_SECONDS", 0.02)
    through: list[int] = []
    last = threading.Event()

    def work(link: DistributedContext) -> list[int]:
        def mine() -> int:
            if link.rank == 1:
                last.wait(0.3)
            through.append(link.rank)
            return link.rank**2

        found = run_on_all_ranks(link, "counting", mine)
        assert through[-1] == 1 and len(through) == RANKS
        return found

    assert on_every_rank(work) == [[0, 1, 4]] * RANKS


def test_who_is_to_leave_leaves() -> None:
    alone = DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, "here"),)), None, None)
    shutdown = threading.Event()
    with pytest.raises(Shutdown):
        run_on_all_ranks(alone, "shutdown", shutdown.set, shutdown=shutdown)

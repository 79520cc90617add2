"""A checkpoint that several ranks write, which are threads here: shards, order, and a rank that fails."""

import errno
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

from terakoya.distributed import all_ranks
from terakoya.distributed.all_ranks import Shutdown, run_on_all_ranks
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import FileError, TemporaryFailure, UserError
from terakoya.runs import checkpoints
from terakoya.training.checkpoint import checkpoint, recovery
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.engines import tensor_shards
from terakoya.training.engines.tensor_shards import Kind, TensorShard, assign_shards, whole_shard

RANKS = 3


class Exchange:
    """Exchanges one value of each thread."""

    def __init__(self) -> None:
        self.values: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=20)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass
class Threads(DistributedContext):
    """The context of a rank that is a thread."""

    exchange: Exchange = field(default_factory=Exchange)

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        return [sum(each) for each in zip(*self.exchange.swap(self.rank, counts), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        return self.exchange.swap(self.rank, value)


class Source:
    """The shards of a rank; every rank has the same module."""

    def __init__(self, rank: int, module: nn.Module) -> None:
        self.rank = rank
        self.module = module

    def shards_to_save(self, kind: Kind) -> Iterator[TensorShard]:
        values = list(self.module.state_dict().items()) if kind == "model" else []
        values = values[self.rank :] + values[: self.rank]  # each rank in another order
        yield from assign_shards((whole_shard(name, value) for name, value in values), self.rank, RANKS)


def on_every_rank(work: Callable[[DistributedContext], Any]) -> list[Any]:
    """Returns what `work` returned or raised on each rank."""
    topology = Topology(tuple(ProcessInfo(rank, 0, rank, f"host{rank}") for rank in range(RANKS)))
    exchange = Exchange()
    contexts = [
        Threads(rank, RANKS, torch.device("cpu"), topology, None, None, exchange=exchange) for rank in range(RANKS)
    ]

    def run(context: DistributedContext) -> Any:
        try:
            return work(context)
        except (UserError, Shutdown) as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, contexts))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(tensor_shards, "BLOCK_BYTES", 64)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))


def save(tmp_path: Path, module: nn.Module, step: int) -> list[Any]:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "vocab.txt").write_text("[PAD]\n")
    return on_every_rank(
        lambda context: checkpoint.save(
            checkpoint.Place(tmp_path / "checkpoints", tokenizer, 2), step, context,
            checkpoint.Content(
                {"world": RANKS}, Source(context.rank, module), {},
                lambda folder: (folder / "model.json").write_text("{}") and None,
            ),
        )
    )  # fmt: skip


def test_every_rank_writes_its_shards_and_the_manifest_lists_all(tmp_path: Path, module: nn.Module) -> None:
    folder = tmp_path / "checkpoints/step-00000001"
    assert save(tmp_path, module, 1) == [folder] * RANKS
    assert checkpoints.find_problems(folder) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 3 and manifest["world"] == RANKS
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
    found, messages = recovery.recover_newest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-00000001"
    assert len(messages) == 1 and "state/model-00002.safetensors" in messages[0] and "quarantine" in messages[0]
    assert (tmp_path / "checkpoints/quarantine/step-00000002").is_dir()


@pytest.mark.parametrize(
    "failure",
    [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), SafetensorError("disk full")],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_where_one_rank_cannot_write_all_raise_and_other_checkpoints_stay(
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
    assert checkpoints.find_problems(tmp_path / "checkpoints/step-00000001") == []


def test_where_one_rank_holds_numbers_that_are_not_finite_all_raise(tmp_path: Path, module: nn.Module) -> None:
    save(tmp_path, module, 1)
    with torch.no_grad():
        module[1].bias[2] = torch.nan
    raised = save(tmp_path, module, 2)
    assert [str(each) for each in raised] == [str(raised[0])] * RANKS and isinstance(raised[0], UserError)
    assert str(raised[0]).startswith("step 2: 1 tensors of the model or of the optimizer's state hold numbers that are")
    assert "(1.bias)" in str(raised[0]) and "step-00000001, from before, stays" in str(raised[0])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TemporaryFailure("no answer"), 74),
        (FileError("no answer", errno.ESTALE), 74),
        (OSError(errno.EIO, "no answer"), 74),
        (OSError(errno.EROFS, "read-only"), 2),
        (UserError("a mistake"), 2),
    ],
)
def test_all_ranks_end_with_the_exit_code_of_the_one_that_failed(error: Exception, code: int) -> None:
    raised = on_every_rank(lambda context: context.raise_on_all_ranks("it", error if context.rank == 1 else None))
    assert [each.exit_code for each in raised] == [code] * RANKS


def test_the_manifest_waits_for_the_slowest_rank(
    tmp_path: Path, module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files that it lists are on the disk before it is written, whichever rank wrote them."""
    events: list[str] = []
    real_save, real_fsync, real_rename = checkpoint_state.save_file, os.fsync, Path.rename
    slow = threading.Event()

    def save_slowly(tensors: Any, path: Path, metadata: Any) -> None:
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
    monkeypatch.setattr(checkpoint_state, "save_file", save_slowly)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, module, 1)
    manifest = events.index("manifest.json")
    assert {f"model-0000{rank}.safetensors" for rank in range(RANKS)} <= set(events[:manifest])
    assert events[-2:] == ["rename step-00000001", "checkpoints"] and manifest < len(events) - 2


@pytest.mark.slow
def test_a_checkpoint_with_a_tensor_that_no_rank_wrote_is_never_committed(tmp_path: Path, module: nn.Module) -> None:
    """Otherwise the missing tensor would only be noticed when the run resumes."""
    (tmp_path / "tokenizer").mkdir()
    alone = DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, "here"),)), None, None)
    with pytest.raises(AssertionError, match=r"weight'\] were not written once"):
        checkpoint.save(
            checkpoint.Place(tmp_path / "checkpoints", tmp_path / "tokenizer", 2), 1, alone,
            checkpoint.Content({}, Source(0, module), {}, lambda folder: None),
        )  # fmt: skip
    assert checkpoints.list_checkpoints(tmp_path / "checkpoints") == []


def test_all_ranks_return_the_results_of_all_when_the_last_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_ranks, "HEARTBEAT_SECONDS", 0.02)
    finished: list[int] = []
    last = threading.Event()

    def work(context: DistributedContext) -> list[int]:
        def square() -> int:
            if context.rank == 1:
                last.wait(0.3)
            finished.append(context.rank)
            return context.rank**2

        results = run_on_all_ranks(context, "counting", square)
        assert finished[-1] == 1 and len(finished) == RANKS
        return results

    assert on_every_rank(work) == [[0, 1, 4]] * RANKS


def test_a_shutdown_ends_the_wait() -> None:
    alone = DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, "here"),)), None, None)
    shutdown = threading.Event()
    with pytest.raises(Shutdown):
        run_on_all_ranks(alone, "shutdown", shutdown.set, shutdown=shutdown)

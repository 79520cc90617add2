"""How a checkpoint is committed: it is complete or absent, whatever happens during the save."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_folders import write_checkpoint
from torch import nn

from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import FileError, UserError
from terakoya.runs import checkpoints
from terakoya.training.checkpoint import checkpoint, event_tensors, recovery
from terakoya.training.checkpoint import state as checkpoint_state
from terakoya.training.engines.ddp import DDPEngine, StepOptions
from terakoya.training.engines.tensor_shards import TensorShard, whole_shard
from terakoya.training.saving import Saver


def alone() -> DistributedContext:
    return DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, "here"),)), None, None)


def engine(seed: int = 0) -> DDPEngine:
    """A small network with a tied weight and a buffer, one optimizer step old."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    built = DDPEngine(alone(), module, optimizer, StepOptions(max_grad_norm=1.0))
    module(torch.randn(8, 4)).square().sum().backward()
    built.step(0.1)
    return built


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n")
    return folder


@pytest.fixture
def save(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., Path]:
    def save(step: int, *, keep: int = 3, of: DDPEngine | None = None, events: Any = None) -> Path:
        place = checkpoint.Place(tmp_path / "checkpoints", tokenizer_folder, keep)
        facts = {"consumed_rows": 8 * step}
        content = checkpoint.Content(facts, of or engine(step), events or {}, lambda folder: None)
        return checkpoint.save(place, step, alone(), content)

    return save


def test_tensors_of_event_plugins_are_read_whole_or_in_any_part(save: Callable[..., Path]) -> None:
    whole = torch.arange(24.0).view(4, 6)
    parts = [TensorShard("box", whole[:, first : first + 3], (4, 6), (0, first)) for first in (0, 3)]
    flat = [TensorShard("flat", whole.flatten()[first:last], (4, 6), first) for first, last in ((0, 7), (7, 24))]
    shards = [replace(each, value=each.value.clone()) for each in (*parts, *flat, whole_shard("one", whole))]
    saved = event_tensors.SavedEventTensors(save(1, events={"mine": shards}), "mine")
    assert sorted(saved) == ["box", "flat", "one"] and len(saved) == 3
    for name in saved:
        assert torch.equal(saved[name], whole)
        for shard in (*parts, *flat, TensorShard("", whole[1:3], (4, 6), (1, 0)), whole_shard("", whole)):
            assert torch.equal(saved.at(replace(shard, name=name)), shard.value), (name, shard.start)
    with pytest.raises(KeyError):
        saved["two"]


def test_tensors_of_event_plugins_that_are_not_whole_are_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    half = TensorShard("average", torch.ones(2), (4,), 0)
    with pytest.raises(
        UserError, match=r"events\.mine: .*missing or repeated elements of average; EventListener.shards"
    ):
        save(1, events={"mine": [half]})
    assert not (tmp_path / "checkpoints/step-00000001").exists()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_loaded_checkpoint_equals_the_saved_state(save: Callable[..., Path]) -> None:
    before = engine(1)
    folder = save(10, of=before)
    after = engine(2)
    checkpoint_state.load(folder, after)
    for (name, old), (_, new) in zip(before.model_state(), after.model_state(), strict=True):
        assert torch.equal(old, new), name
    old_state, new_state = dict(before.optimizer_state()), dict(after.optimizer_state())
    assert old_state.keys() == new_state.keys() and len(old_state) == 3 * 5
    assert all(torch.equal(old_state[key], new_state[key]) for key in old_state)
    assert after.module[2].weight is after.module[0].weight
    assert checkpoints.read_manifest(folder)["consumed_rows"] == 80
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plain[2].weight = plain[0].weight
    checkpoint_state.load_module(folder, plain)
    assert torch.equal(plain[0].weight, before.module[0].weight)
    assert torch.equal(plain[1].running_mean, before.module[1].running_mean)


def test_loaded_optimizer_state_has_the_same_order_in_every_process(save: Callable[..., Path]) -> None:
    """Processes assign the next checkpoint's shards in this order; sets of names are ordered differently in each."""
    after = engine(2)
    checkpoint_state.load(save(10), after)
    loaded = [name.rpartition("/")[2] for name, _ in after.optimizer_state()]
    assert loaded == ["exp_avg", "exp_avg_sq", "step"] * 5


def test_pruning_keeps_at_least_two_checkpoints(tmp_path: Path, save: Callable[..., Path]) -> None:
    for step in (1, 2, 3, 4):
        save(step, keep=2)
    assert names(tmp_path / "checkpoints") == ["step-00000003", "step-00000004"]
    save(5, keep=1)
    assert names(tmp_path / "checkpoints") == ["step-00000004", "step-00000005"]
    # a truncated checkpoint does not count as one of the two
    weights = tmp_path / "checkpoints/step-00000005/state/model-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    save(6, keep=2)
    assert names(tmp_path / "checkpoints") == ["step-00000004", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "no manifest"])
def test_a_damaged_checkpoint_goes_to_quarantine_and_the_one_before_is_used(
    damage: str, tmp_path: Path, save: Callable[..., Path]
) -> None:
    save(1)
    folder = save(2)
    weights = folder / "state/model-00000.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        weights.write_bytes(content[:-1])
    elif damage == "flipped":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"format": 1')
    else:
        (folder / "manifest.json").unlink()
    found, messages = recovery.recover_newest(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-00000001"
    assert len(messages) == 1 and "step-00000002 is damaged" in messages[0]
    assert (tmp_path / "checkpoints/quarantine/step-00000002").is_dir()


def test_leftovers_of_a_killed_save_are_removed_and_reported(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = save(1)
    shutil.copytree(folder, tmp_path / "checkpoints/.staging-step-00000002")
    shutil.copytree(folder, tmp_path / "checkpoints/.removing-step-00000000")
    found, messages = recovery.recover_newest(tmp_path / "checkpoints")
    assert found == folder and len(messages) == 2
    assert names(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_full_disk_leaves_no_files_and_is_named(
    tmp_path: Path, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_state, "save_file", full)
    with pytest.raises(UserError, match=r"rank 0 on here: OSError.*No space left"):
        save(2)
    assert names(tmp_path / "checkpoints") == ["step-00000001"]


def test_the_manifest_is_written_last_and_the_folder_renamed_after_it(
    tmp_path: Path, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever instant the process dies, a folder with its final name has a manifest of all its files."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append("sync " + str(Path(f"/proc/self/fd/{handle}").readlink()).rpartition("/checkpoints/")[2])
        real_fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(1)
    named = events.index("rename .staging-step-00000001 step-00000001")
    files = [event for event in events[:named] if "safetensors" in event or "vocab.txt" in event]
    manifest = events.index("sync .staging-step-00000001/manifest.json")
    assert len(files) == 3 and all(events.index(file) < manifest for file in files)
    assert manifest < events.index("sync .staging-step-00000001") < named
    assert len(events) == named + 2, "the parent folder is synced after the rename"


def test_other_folders_and_links_are_not_checkpoints(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = save(3)
    root = tmp_path / "checkpoints"
    (root / "step-7").mkdir()
    (root / "latest").mkdir()
    (root / "step-00000009").symlink_to(folder)
    assert checkpoints.list_checkpoints(root) == [(3, folder)]


def test_a_manifest_cannot_point_outside(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = save(1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../tokenizer/vocab.txt"] = {"size": 6, "sha256": "0"}
    (folder / "manifest.json").write_text(json.dumps(checkpoints.with_hash(manifest)))
    assert checkpoints.find_problems(folder) == ["../../tokenizer/vocab.txt: missing"]


def test_large_states_are_split_into_several_files(
    tmp_path: Path, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_state, "FILE_BYTES", 64)
    before = engine(1)
    folder = save(1, of=before)
    assert len(list((folder / "state").glob("model-*.safetensors"))) > 2
    after = engine(2)
    checkpoint_state.load(folder, after)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before.model_state(), after.model_state(), strict=True))


def test_a_checkpoint_of_another_model_is_refused(save: Callable[..., Path]) -> None:
    folder = save(1)

    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UserError, match=r"has no tensor 1\.bias|has tensors this model does not know"):
        checkpoint_state.load_module(folder, other)


def test_pruning_keeps_a_checkpoint_to_which_the_run_may_go_back(tmp_path: Path) -> None:
    for step in range(0, 12, 2):
        write_checkpoint(tmp_path, step)
    checkpoints_folder = tmp_path / "checkpoints"

    def kept(keep_before: int | None) -> list[int]:
        checkpoint.prune(checkpoints_folder, 2, keep_before=keep_before)
        return [step for step, _ in checkpoints.list_checkpoints(checkpoints_folder)]

    assert kept(-1) == [0, 2, 4, 6, 8, 10], "with none so old, all that there are"
    assert kept(5) == [4, 6, 8, 10]
    assert kept(10) == kept(None) == [8, 10]


@pytest.mark.parametrize(("number", "ends"), [(errno.ENOSPC, False), (errno.EFBIG, True)])
def test_a_limit_of_file_sizes_ends_a_run_at_once_and_a_full_disk_does_not(number: int, ends: bool) -> None:
    warned: list[str] = []
    saver: Any = SimpleNamespace(
        step=4, saved_step=2, failures=0, run_log=SimpleNamespace(warn=lambda text, **_: warned.append(text))
    )

    def save() -> Path:
        raise FileError("saving failed", number)

    if not ends:
        assert Saver._result(saver, save) is None and "1 of 3 failed saves in a row" in warned[0]
        return
    with pytest.raises(UserError, match=r"saving failed; step 2 is safe; raise the limit of file sizes") as raised:
        Saver._result(saver, save)
    assert raised.value.exit_code == 2 and warned == []

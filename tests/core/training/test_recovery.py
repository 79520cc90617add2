"""From which checkpoint a run continues, and when it refuses to start at step 0."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import toy
from checkpoint_folders import write_checkpoint, write_manifest

from terakoya.config.parameters import Parameters
from terakoya.errors import TemporaryFailure, UserError
from terakoya.runs import checkpoints
from terakoya.training.checkpoint import recovery
from terakoya.training.checkpoint.recovery import recover_newest
from terakoya.training.setup import StartOptions, train_in_this_process
from terakoya.training.start import meeting


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none takes time."""
    made: list[float] = []
    monkeypatch.setattr(recovery.time, "sleep", made.append)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of two whole checkpoints."""
    write_checkpoint(tmp_path, 4)
    return write_checkpoint(tmp_path, 6).parent


def fail_to_read(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """The first `times` reads of a manifest find a stale file handle."""
    real, left = Path.read_bytes, [times]

    def read_bytes(self: Path) -> bytes:
        if self.name == "manifest.json" and left[0]:
            left[0] -= 1
            raise OSError(116, "Stale file handle", str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(folder: Path) -> None:
    (folder / "state/model-00000.safetensors").unlink()


def test_a_hiccup_of_the_file_system_is_waited_out(
    root: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_read(monkeypatch, times=2)
    assert recover_newest(root) == (root / "step-00000006", [])
    assert pauses == [1.0, 3.0]


def test_a_file_system_that_stays_away_ends_the_start_and_moves_nothing(
    root: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / ".staging-step-00000008").mkdir()
    damage(root / "step-00000006")
    real = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self.parent.name == "step-00000004":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(
        TemporaryFailure, match=r"4/manifest\.json: cannot be read now: Permission denied.*nothing was moved"
    ):
        recover_newest(root, start_over=True)
    assert pauses == list(recovery.PAUSES)
    assert names(root) == [".staging-step-00000008", "step-00000004", "step-00000006"]


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, 74), (errno.EIO, 74), (errno.EROFS, 2)])
def test_a_run_folder_on_a_server_that_does_not_answer_is_worth_another_start(
    number: int, code: int, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> int:
        raise OSError(number, "no answer", str(path))

    monkeypatch.setattr(meeting, "lock_run", fail)
    with pytest.raises(UserError, match="no answer") as raised:
        train(store, tmp_path)
    assert raised.value.exit_code == code


def test_a_newer_format_ends_the_start_at_once_and_moves_nothing(root: Path, pauses: list[float]) -> None:
    write_manifest(root / "step-00000006", 6, format=checkpoints.FORMAT + 1)
    with pytest.raises(UserError, match="of a newer version of terakoya"):
        recover_newest(root)
    assert pauses == [] and names(root) == ["step-00000004", "step-00000006"]


def test_a_run_whose_checkpoints_are_all_damaged_needs_consent(root: Path) -> None:
    for folder in root.iterdir():
        damage(folder)
    with pytest.raises(UserError, match="none of them is whole") as raised:
        recover_newest(root)
    assert "step-00000006 is damaged (state/model-00000.safetensors: missing)" in str(raised.value)
    assert "step-00000004 is damaged" in str(raised.value) and "--start-over" in str(raised.value)
    assert names(root) == ["step-00000004", "step-00000006"]
    newest, messages = recover_newest(root, start_over=True)
    assert newest is None and len(messages) == 2 and names(root / "quarantine") == ["step-00000004", "step-00000006"]
    with pytest.raises(UserError, match="quarantine/ holds step-00000004, step-00000006"):
        recover_newest(root)


def test_a_run_whose_metrics_record_a_checkpoint_needs_consent(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()

    def write(*records: dict[str, Any]) -> None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    saved, consent = {"kind": "checkpoint", "step": 6}, {"kind": "resume", "step": 0, "folder": None}
    write({"kind": "start", "step": 0}, {"kind": "step", "step": 5})
    assert recover_newest(tmp_path / "checkpoints") == (None, []), "killed before its first checkpoint"
    for records in ((saved,), (consent, saved), (saved, {"kind": "resume", "step": 0, "folder": "step-00000000"})):
        write(*records)
        with pytest.raises(UserError, match=r"metrics\.jsonl records a checkpoint of step 6"):
            recover_newest(tmp_path / "checkpoints")
    write(saved, consent)  # restarts before the first checkpoint after it need no other consent
    assert recover_newest(tmp_path / "checkpoints") == (None, [])


def test_a_checkpoint_behind_a_link_is_named(root: Path, tmp_path: Path) -> None:
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    (root / "step-00000006").symlink_to(tmp_path / "elsewhere/step-00000006")
    with pytest.raises(UserError, match="step-00000006 is no folder, or a link to one"):
        recover_newest(root)


def test_leftovers_may_be_links_or_files(root: Path, tmp_path: Path) -> None:
    (root / ".staging-step-00000008").symlink_to(tmp_path)
    (root / ".staging-step-00000009").write_text("")
    (root / ".removing-step-00000002").symlink_to(tmp_path / "nothing")
    newest, messages = recover_newest(root)
    assert newest == root / "step-00000006" and len(messages) == 3
    assert names(root) == ["step-00000004", "step-00000006"] and tmp_path.is_dir()


def test_a_quarantine_that_is_a_file_is_named(root: Path) -> None:
    damage(root / "step-00000006")
    (root / "quarantine").write_text("")
    with pytest.raises(UserError, match=r"quarantine: expected a folder for damaged checkpoints, found a file"):
        recover_newest(root)


def train(store: Path, out: Path, **options: Any) -> None:
    settings = {"max_steps": 2, "checkpoint": {"save_steps": 1}, **options.pop("settings", {})}
    train_in_this_process(
        Parameters.from_dict(toy.parameters(store, **settings), source="test"), out, StartOptions(**options)
    )


@pytest.mark.slow
def test_a_run_starts_over_only_where_it_is_told_to(store: Path, tmp_path: Path) -> None:
    train(store, tmp_path)
    losses = toy.losses(tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / "state/model-00000.safetensors").unlink()
    before = names(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="--start-over"):
        train(store, tmp_path)
    assert names(tmp_path / "checkpoints") == before
    train(store, tmp_path, start_over=True)
    assert toy.losses(tmp_path) == losses
    train(store, tmp_path, start_over=True, settings={"max_steps": 3})  # continues where there is a whole checkpoint
    assert [record["step"] for record in toy.records(tmp_path, "resume").values()] == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_weights_that_an_update_has_destroyed_are_never_saved(background: bool, store: Path, tmp_path: Path) -> None:
    """Not even those of the last step; the run continues from the checkpoint before."""
    checkpoint = {"save_steps": 1, "async_save": background}
    settings: dict[str, Any] = {"checkpoint": checkpoint, "schedule": {"type": "constant"}, "max_steps": 2}
    train(store, tmp_path, settings={**settings, "max_steps": 1})
    destructive = {**settings, "optimizer": {"type": "adamw", "learning_rate": 3e38}}
    for _ in range(2):
        with pytest.raises(UserError, match=r"^step 2: \d+ tensors .*step-00000001, from before, stays"):
            train(store, tmp_path, settings=destructive, allow_change=frozenset({"optimizer.learning_rate"}))
        assert names(tmp_path / "checkpoints") == ["step-00000001"]
    train(store, tmp_path, settings=settings)
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000002"]
    with pytest.raises(UserError, match=r"^step 1: .*Nothing was saved before"):
        train(store, tmp_path / "new", settings={**destructive, "max_steps": 1})


@pytest.mark.slow
def test_a_file_of_somebody_else_in_a_state_is_not_read(store: Path, tmp_path: Path) -> None:
    train(store, tmp_path)
    state = tmp_path / "checkpoints/step-00000002/state"
    (state / "model-00001.safetensors").write_bytes((state / "model-00000.safetensors").read_bytes())
    train(store, tmp_path, settings={"max_steps": 3})
    assert sorted(toy.records(tmp_path)) == [1, 2, 3]

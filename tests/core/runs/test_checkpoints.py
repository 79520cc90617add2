"""Whether a checkpoint is whole, damaged, or cannot be read now."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import write_checkpoint, write_manifest

from terakoya.errors import TemporaryFailure, UserError
from terakoya.runs import checkpoints


def read_only_damaged(folder: Path) -> dict[str, Any] | None:
    """The manifest of `folder`; None if it is damaged."""
    try:
        return checkpoints.read_manifest(folder)
    except checkpoints.DamagedError:
        return None


@pytest.mark.parametrize("flips", [300, pytest.param(4000, marks=pytest.mark.nightly)])
def test_no_flipped_bit_of_a_manifest_is_believed(flips: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    manifest = folder / "manifest.json"
    content, written = manifest.read_bytes(), checkpoints.read_manifest(folder)
    draw = random.Random(0)
    found = 0
    for position in draw.sample(range(8 * len(content)), flips):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        manifest.write_bytes(flipped)
        believed = read_only_damaged(folder)
        assert believed in (None, written), position
        found += believed is None
    assert found > 0.95 * flips
    manifest.write_text(json.dumps(written))  # another layout of the same content
    assert checkpoints.find_problems(folder) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda each: each | {"step": 5}, "is of step 5, in a folder of step 4"),
        (lambda each: each | {"consumed_rows": 3}, "3 rows in 4 steps"),
        (lambda each: each | {"consumed_rows": 61}, None),  # the last step of a run may hold fewer rows
        (lambda each: each | {"step": "4"}, "step"),
        (
            lambda each: each | {"files": {"state/model-00000.safetensors": {"sise": 100}}},
            "not a checkpoint's manifest",
        ),
    ],
)
def test_the_values_of_a_manifest_must_agree(change: Callable[[Any], Any], problem: str | None, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(checkpoints.with_hash(change(manifest))))
    problems = checkpoints.find_problems(folder)
    assert len(problems) == (problem is not None) and all((problem or "") in line for line in problems)


def test_a_manifest_without_its_hash_is_damaged(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    manifest = json.loads((folder / "manifest.json").read_text())
    for content in ({key: manifest[key] for key in manifest if key != "sha256"}, {**manifest, "format": 2}, [], {}):
        (folder / "manifest.json").write_text(json.dumps(content))
        assert len(checkpoints.find_problems(folder)) == 1


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    write_manifest(folder, 4, format=checkpoints.FORMAT + 1, new=True)
    with pytest.raises(UserError, match=r"has format 4, of a newer version of terakoya; .*Nothing was moved"):
        checkpoints.find_problems(folder)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"new": true', '"new": null'))
    assert "content changed" in checkpoints.find_problems(folder)[0], "every format has the hash"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("file", ["manifest.json", "state/optimizer-00000.safetensors"])
def test_what_cannot_be_read_is_not_damaged(
    file: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, 4)
    real = Path.open

    def fail(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == folder / file:
            raise OSError(number, "the server is gone", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(TemporaryFailure, match=rf"{file}: cannot be read now: the server is gone; that is no"):
        checkpoints.find_newest_whole(tmp_path / "checkpoints")
    assert TemporaryFailure.exit_code == 74


def test_a_link_to_itself_will_not_pass(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").symlink_to(tmp_path / "step-00000001")
    with pytest.raises(UserError, match="Too many levels of symbolic links") as refused:
        checkpoints.read_manifest(tmp_path / "step-00000001")
    assert not isinstance(refused.value, TemporaryFailure)


def test_only_the_named_contents_are_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    file = folder / "state/model-00000.safetensors"
    file.write_bytes(bytes(100))
    assert checkpoints.find_problems(folder) == ["state/model-00000.safetensors: content changed"]
    assert checkpoints.find_problems(folder, hashed=()) == []
    assert checkpoints.find_problems(folder, hashed=("model/", "state/opt")) == []
    file.write_bytes(b"")
    assert checkpoints.find_problems(folder, hashed=()) == ["state/model-00000.safetensors: 0 bytes, expected 100"]
    file.unlink()
    file.symlink_to(folder / "state/optimizer-00000.safetensors")
    assert checkpoints.find_problems(folder) == ["state/model-00000.safetensors: not a regular file"]


def test_the_newest_whole_one_is_found_and_nothing_is_moved(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    root = tmp_path / "checkpoints"
    (root / "step-00000006/state/model-00000.safetensors").unlink()
    newest, damaged = checkpoints.find_newest_whole(root)
    assert newest == root / "step-00000004"
    assert damaged == {root / "step-00000006": ["state/model-00000.safetensors: missing"]}
    assert [step for step, _ in checkpoints.list_checkpoints(root)] == [2, 4, 6]
    assert checkpoints.find_newest_whole(tmp_path / "nothing") == (None, {})
